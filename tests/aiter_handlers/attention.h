// Append and attention over pages of tokens, "NHD": (pages, tokens per page, KV heads, head dim).
//
// `Rules` holds the steps that a deliberately wrong handler does otherwise (broken.cc); `Honest` does them right.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "elements.h"

namespace paged {

struct Geometry {
  int64_t pages, page_size, kv_heads, head_dim;
  int64_t RowElements() const { return kv_heads * head_dim; }
  int64_t Slots() const { return pages * page_size; }
};

struct Honest {
  static int64_t KvHead(int64_t head, int64_t heads, int64_t kv_heads) { return head / (heads / kv_heads); }
  static float Scale(float scale, int64_t, int64_t) { return scale; }
  static int64_t Length(int64_t pages, int64_t page_size, int64_t last) { return (pages - 1) * page_size + last; }
  static int64_t Entry(int64_t begin, int64_t index, int64_t) { return begin + index; }
  static int64_t Page(int64_t page) { return page; }
  static int64_t Slot(int64_t slot) { return slot; }
  static int64_t Position(int64_t token, int64_t queries, int64_t length) { return length - queries + token; }
  static int64_t Left(int64_t left) { return left; }
  static const void* Values(const void*, const void* values) { return values; }
  static const void* NewValues(const void*, const void* values) { return values; }
  static float Merge(float weight) { return weight; }
  static float Output(float value, bool) { return value; }
  static uint64_t Element(uint64_t word, int) { return word; }
};

// Pages of one row, and how much of the last one is filled.
struct Row {
  const int32_t* indices;
  int64_t begin, count, last;
};

// Writes each token to its slot; negative slots are skipped. The caller has checked every bound.
template <typename Rules>
void Append(const Geometry& pool, const void* tokens, const int32_t* slots, int64_t count, int width, void* stored) {
  const int64_t row = pool.RowElements();
  for (int64_t token = 0; token < count; ++token) {
    const int64_t slot = Rules::Slot(slots[token]);
    if (slot < 0 || slot >= pool.Slots()) continue;
    for (int64_t i = 0; i < row; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, static_cast<const char*>(tokens) + (token * row + i) * width, width);
      word = Rules::Element(word, width);
      std::memcpy(static_cast<char*>(stored) + (slot * row + i) * width, &word, width);
    }
  }
}

// Softmax weights of a span of positions against one query, in base e, and the partial output that they give.
struct Partial {
  float largest = -INFINITY, sum = 0.0f;
  std::vector<float> out;
};

// Attends one query to the positions first .. end - 1 of a row. Weights are rounded to the element's type before they
// meet V, as on the vendor's matrix units; slots of the last page beyond the row's length are read with weight zero.
template <typename Element, typename Rules>
Partial Attend(const Geometry& pool, const typename Element::Word* query, const void* keys, const void* values,
               const Row& row, int64_t kv_head, int64_t first, int64_t end, int64_t length, float scale,
               bool read_dead) {
  using Word = typename Element::Word;
  const int64_t dim = pool.head_dim;
  const auto* k = static_cast<const Word*>(keys);
  const auto* v = static_cast<const Word*>(Rules::Values(keys, values));
  auto offset = [&](int64_t position) {
    const int64_t entry = Rules::Entry(row.begin, position / pool.page_size, row.count);
    const int64_t page = Rules::Page(row.indices[entry]);
    return ((page * pool.page_size + position % pool.page_size) * pool.kv_heads + kv_head) * dim;
  };
  Partial result;
  result.out.assign(dim, 0.0f);
  std::vector<float> logits;
  for (int64_t position = first; position < end; ++position) {
    const Word* key = k + offset(position);
    float sum = 0.0f;
    for (int64_t i = 0; i < dim; ++i) sum += Element::Load(query[i]) * Element::Load(key[i]);
    logits.push_back(sum * scale);
    result.largest = std::max(result.largest, logits.back());
  }
  for (int64_t position = first; position < end; ++position) {
    const float weight = std::exp(logits[position - first] - result.largest);
    result.sum += weight;
    const float rounded = Element::Load(Element::Store(weight));
    const Word* value = v + offset(position);
    for (int64_t i = 0; i < dim; ++i) result.out[i] += rounded * Element::Load(value[i]);
  }
  if (read_dead) {
    for (int64_t position = length; position < row.count * pool.page_size; ++position) {
      const Word* value = v + offset(position);
      for (int64_t i = 0; i < dim; ++i) result.out[i] += 0.0f * Element::Load(value[i]);
    }
  }
  return result;
}

constexpr int64_t kPartition = 256;

// One token per row, in partitions of 256 tokens whose results go through the workspace in the vendor's layout:
// sums and maxima in float32, outputs in the element's type.
template <typename Element, typename Rules>
void Decode(const Geometry& pool, int64_t rows, int64_t heads, const void* query, const void* keys, const void* values,
            const int32_t* indptr, const int32_t* indices, const int32_t* last, float scale, int64_t partitions,
            void* workspace, void* out) {
  using Word = typename Element::Word;
  const int64_t dim = pool.head_dim;
  auto* sums = static_cast<float*>(workspace);
  float* maxima = sums + rows * heads * partitions;
  auto* partial_out = reinterpret_cast<Word*>(maxima + rows * heads * partitions);
  for (int64_t r = 0; r < rows; ++r) {
    const Row row{indices, indptr[r], indptr[r + 1] - indptr[r], last[r]};
    const int64_t length = Rules::Length(row.count, pool.page_size, row.last);
    const int64_t used = (length + kPartition - 1) / kPartition;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (r * heads + h) * partitions;
      const auto* q = static_cast<const Word*>(query) + (r * heads + h) * dim;
      for (int64_t p = 0; p < used; ++p) {
        const int64_t end = std::min((p + 1) * kPartition, length);
        const Partial part =
            Attend<Element, Rules>(pool, q, keys, values, row, Rules::KvHead(h, heads, pool.kv_heads), p * kPartition,
                                   end, length, Rules::Scale(scale, heads, dim), p + 1 == used);
        sums[at + p] = part.sum;
        maxima[at + p] = part.largest;
        for (int64_t i = 0; i < dim; ++i) {
          partial_out[(at + p) * dim + i] = Element::Store(Rules::Output(part.out[i] / (part.sum + 1e-6f), true));
        }
      }
      float largest = -INFINITY, total = 0.0f;
      for (int64_t p = 0; p < used; ++p) largest = std::max(largest, maxima[at + p]);
      std::vector<float> merged(dim, 0.0f);
      for (int64_t p = 0; p < used; ++p) {
        const float weight = Rules::Merge(sums[at + p] * std::exp(maxima[at + p] - largest));
        total += weight;
        for (int64_t i = 0; i < dim; ++i) merged[i] += weight * Element::Load(partial_out[(at + p) * dim + i]);
      }
      auto* o = static_cast<Word*>(out) + (r * heads + h) * dim;
      for (int64_t i = 0; i < dim; ++i) o[i] = Element::Store(Rules::Output(merged[i] / (total + 1e-6f), true));
    }
  }
}

// Ragged rows. `left` and `right` count tokens before and after a query's own position; negative is no bound. Causality is
// bottom-right aligned and sets the right bound to 0. Tokens past the last row's end get NaN, where the vendor writes
// nothing.
template <typename Element, typename Rules>
void Prefill(const Geometry& pool, int64_t tokens, int64_t rows, int64_t heads, const void* query, const void* keys,
             const void* values, const int32_t* offsets, const int32_t* indptr, const int32_t* indices,
             const int32_t* last, float scale, bool causal, int64_t left, int64_t right, void* out) {
  using Word = typename Element::Word;
  const int64_t dim = pool.head_dim;
  auto* output = static_cast<Word*>(out);
  std::fill(output, output + tokens * heads * dim, Element::Nan());
  if (causal) right = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const Row row{indices, indptr[r], indptr[r + 1] - indptr[r], last[r]};
    const int64_t length = Rules::Length(row.count, pool.page_size, row.last);
    const int64_t queries = offsets[r + 1] - offsets[r];
    for (int64_t token = 0; token < queries; ++token) {
      const int64_t position = Rules::Position(token, queries, length);
      const int64_t bound = Rules::Left(left);
      const int64_t first = left < 0 ? 0 : std::max<int64_t>(0, position - bound);
      const int64_t end = std::max(first, right < 0 ? length : std::min(length, position + right + 1));
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = ((offsets[r] + token) * heads + h) * dim;
        const Partial part = Attend<Element, Rules>(pool, static_cast<const Word*>(query) + at, keys, values, row,
                                                    Rules::KvHead(h, heads, pool.kv_heads), first, end, length,
                                                    Rules::Scale(scale, heads, dim), true);
        for (int64_t i = 0; i < dim; ++i) {
          output[at + i] = Element::Store(Rules::Output(end > first ? part.out[i] / part.sum : NAN, false));
        }
      }
    }
  }
}

}  // namespace paged
