// The same targets with one fault at a time, chosen by name while they run: `set_fault("")` makes them honest again.
//
// For tests of the suite: each fault must be found by a case that names the clause it breaks.
#include <atomic>
#include <iterator>
#include <string_view>

#include "targets.h"

namespace {

enum Fault {
  kNone,
  kSlotOffByOne,
  kPaddingIsWritten,
  kMinusZeroIsCleared,
  kNewValuesAreKeys,
  kScaleTwice,
  kScaleFromHeads,
  kWholeLastPage,
  kOneTokenShort,
  kPagesReversed,
  kFirstRowsPages,
  kPageIdsInFourBits,
  kHeadsModulo,
  kValuesAreKeys,
  kWindowTooLong,
  kTopLeft,
  kMergeUnweighted,
  kTruncates,
  kNeverTheSame,
};
constexpr std::string_view kNames[] = {
    "",
    "slot-off-by-one",
    "padding-is-written",
    "minus-zero-is-cleared",
    "new-values-are-keys",
    "scale-twice",
    "scale-from-heads",
    "whole-last-page",
    "one-token-short",
    "pages-reversed",
    "first-rows-pages",
    "page-ids-in-four-bits",
    "heads-modulo",
    "values-are-keys",
    "window-too-long",
    "top-left",
    "merge-unweighted",
    "truncates",
    "never-the-same",
};
std::atomic<int> fault{kNone};
std::atomic<uint32_t> calls{0};

bool Is(Fault one) { return fault.load(std::memory_order_relaxed) == one; }

struct Broken : paged::Honest {
  static int64_t KvHead(int64_t head, int64_t heads, int64_t kv_heads) {
    return Is(kHeadsModulo) ? head % kv_heads : Honest::KvHead(head, heads, kv_heads);
  }
  static float Scale(float scale, int64_t heads, int64_t) {
    if (Is(kScaleFromHeads)) return 1.0f / std::sqrt(static_cast<float>(heads));
    return Is(kScaleTwice) ? scale * scale : scale;
  }
  static int64_t Length(int64_t pages, int64_t page_size, int64_t last) {
    const int64_t length = Honest::Length(pages, page_size, last);
    if (Is(kOneTokenShort)) return length > 1 ? length - 1 : length;
    return Is(kWholeLastPage) ? pages * page_size : length;
  }
  static int64_t Entry(int64_t begin, int64_t index, int64_t count) {
    if (Is(kPagesReversed)) return begin + count - 1 - index;
    return Is(kFirstRowsPages) ? index : begin + index;
  }
  static int64_t Page(int64_t page) { return Is(kPageIdsInFourBits) ? page & 15 : page; }
  static int64_t Slot(int64_t slot) {
    if (Is(kPaddingIsWritten) && slot < 0) return 17;
    return Is(kSlotOffByOne) && slot >= 0 ? slot + 1 : slot;
  }
  static int64_t Position(int64_t token, int64_t queries, int64_t length) {
    return Is(kTopLeft) ? token : Honest::Position(token, queries, length);
  }
  static int64_t Left(int64_t left) { return Is(kWindowTooLong) ? left + 1 : left; }
  static const void* Values(const void* keys, const void* values) { return Is(kValuesAreKeys) ? keys : values; }
  static const void* NewValues(const void* keys, const void* values) { return Is(kNewValuesAreKeys) ? keys : values; }
  static float Merge(float weight) { return Is(kMergeUnweighted) ? 1.0f : weight; }
  static float Output(float value, bool) {
    if (Is(kNeverTheSame)) return value * (1.0f + 0.01f * static_cast<float>(calls.fetch_add(1) % 7));
    // Bits below bfloat16's are cut off, as the vendor's default build does.
    return Is(kTruncates) ? paged::FloatOfBits(paged::BitsOfFloat(value) & 0xffff0000u) : value;
  }
  static uint64_t Element(uint64_t word, int width) {
    return Is(kMinusZeroIsCleared) && width == 2 && word == 0x8000 ? 0 : word;
  }
};

}  // namespace

#pragma GCC visibility push(default)
DEFINE_TARGETS(Broken);

// 0, or −1 for a name that is none.
extern "C" int set_fault(const char* name) {
  for (size_t at = 0; at < std::size(kNames); ++at) {
    if (kNames[at] == name) {
      fault.store(static_cast<int>(at));
      return 0;
    }
  }
  return -1;
}
#pragma GCC visibility pop
