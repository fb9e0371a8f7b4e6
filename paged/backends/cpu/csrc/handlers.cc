// The FFI targets: what they are given is checked here, and computed in the headers.
#include <cstdint>
#include <string>
#include <string_view>

#include "attention.h"
#include "elements.h"
#include "layers.h"
#include "product.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::Error;
using paged::Kind;
using Out = ffi::Result<AnyBuffer>;

Error Invalid(const std::string& why) { return Error(ffi::ErrorCode::kInvalidArgument, why); }

#define PAGED_RETURN_IF_ERROR(expression) \
  if (Error error = (expression); error.failure()) return error

template <typename T>
const T* Data(const AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

std::string Shape(const AnyBuffer& buffer) {
  std::string text = "(";
  for (const int64_t size : buffer.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

Error Expect(std::string_view name, const AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto found = buffer.dimensions();
  if (buffer.element_type() == type && std::equal(found.begin(), found.end(), shape.begin(), shape.end())) {
    return Error::Success();
  }
  std::string wanted;
  for (const int64_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  return Invalid(std::string(name) + " has shape " + Shape(buffer) + " or another element type; expected (" + wanted +
                 ")");
}

Error PoolOf(const AnyBuffer& keys, const AnyBuffer& values, int64_t kind, paged::Pool* pool) {
  if (kind < 0 || kind >= paged::kKinds) return Invalid("kind is " + std::to_string(kind));
  const auto k = keys.dimensions(), v = values.dimensions();
  if (k.size() != 4 || v.size() != 4 || !std::equal(k.begin(), k.begin() + 3, v.begin())) {
    return Invalid("keys and values are pools of " + Shape(keys) + " and " + Shape(values));
  }
  *pool = {Data<char>(keys), Data<char>(values), static_cast<Kind>(kind), k[0], k[1], k[2], k[3], v[3]};
  for (const auto* buffer : {&keys, &values}) {
    if (static_cast<int64_t>(ffi::ByteWidth(buffer->element_type())) != paged::BytesOf(pool->kind)) {
      return Invalid("the pool's elements have another size than its kind");
    }
  }
  if (std::max(pool->key_dim, pool->value_dim) > paged::kMostDim) return Invalid("head dims go up to 512");
  if (std::min({pool->page_size, pool->kv_heads, pool->key_dim, pool->value_dim}) == 0) {
    return Invalid("pools of " + Shape(keys) + " and " + Shape(values) + " hold nothing");
  }
  return Error::Success();
}

// The table, and that every page it names for a row exists: of `num_pages`, from `page_base` of the pool.
Error RowsOf(const AnyBuffer& kv_lens, const AnyBuffer& query_offsets, const AnyBuffer& page_offsets,
             const AnyBuffer& page_ids, int64_t page_base, int64_t num_pages, int64_t tokens, const paged::Pool& pool,
             paged::StepRows* rows) {
  const int64_t count = kv_lens.element_count();
  PAGED_RETURN_IF_ERROR(Expect("kv_lens", kv_lens, ffi::DataType::S32, {count}));
  PAGED_RETURN_IF_ERROR(Expect("query_offsets", query_offsets, ffi::DataType::S32, {count + 1}));
  PAGED_RETURN_IF_ERROR(Expect("page_offsets", page_offsets, ffi::DataType::S32, {count + 1}));
  const int64_t listed = page_ids.element_count();
  PAGED_RETURN_IF_ERROR(Expect("page_ids", page_ids, ffi::DataType::S32, {listed}));
  *rows = {count,
           Data<int32_t>(kv_lens),
           Data<int32_t>(query_offsets),
           Data<int32_t>(page_offsets),
           Data<int32_t>(page_ids),
           page_base};
  if (rows->query_offsets[0] != 0) return Invalid("query_offsets start at " + std::to_string(rows->query_offsets[0]));
  for (int64_t row = 0; row < count; ++row) {
    const std::string where = "row " + std::to_string(row) + ": ";
    const int64_t queries = int64_t{rows->query_offsets[row + 1]} - rows->query_offsets[row];
    const int64_t first = rows->page_offsets[row], last = rows->page_offsets[row + 1], length = rows->kv_lens[row];
    if (queries < 0 || rows->query_offsets[row + 1] > tokens) {
      return Invalid(where + "query_offsets go from " + std::to_string(rows->query_offsets[row]) + " to " +
                     std::to_string(rows->query_offsets[row + 1]) + " of " + std::to_string(tokens) + " tokens");
    }
    if (queries == 0 || length == 0) continue;
    if (length < queries) {
      return Invalid(where + "kv_lens is " + std::to_string(length) + ", with " + std::to_string(queries) + " queries");
    }
    const int64_t pages = (length + pool.page_size - 1) / pool.page_size;
    if (first < 0 || last > listed || last - first < pages) {
      return Invalid(where + "page_offsets go from " + std::to_string(first) + " to " + std::to_string(last) + " of " +
                     std::to_string(listed) + "; kv_lens needs " + std::to_string(pages) + " pages");
    }
    for (int64_t i = first; i < first + pages; ++i) {
      const int64_t page = rows->page_ids[i];
      if (page < 0 || page >= num_pages || page_base + page < 0 || page_base + page >= pool.pages) {
        return Invalid(where + "page " + std::to_string(page) + " does not exist");
      }
    }
  }
  return Error::Success();
}

Error KindOf(const AnyBuffer& buffer, Kind* kind) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: *kind = Kind::kF32; return Error::Success();
    case ffi::DataType::BF16: *kind = Kind::kBF16; return Error::Success();
    case ffi::DataType::F16: *kind = Kind::kF16; return Error::Success();
    default: return Invalid("queries are float32, bfloat16 or float16");
  }
}

// So many helpers as pay: waking one costs some microseconds.
int64_t Helpers(ffi::ThreadPool& pool, int64_t multiplications) {
  constexpr int64_t kWorthAThread = 200000;
  return std::clamp<int64_t>(multiplications / kWorthAThread, 0, std::max<int64_t>(pool.num_threads() - 1, 0));
}

Error Append(ffi::ThreadPool threads, AnyBuffer keys, AnyBuffer values, AnyBuffer key, AnyBuffer value, AnyBuffer slots,
             Out keys_out, Out values_out) {
  if (keys.untyped_data() != keys_out->untyped_data() || values.untyped_data() != values_out->untyped_data()) {
    return Error(ffi::ErrorCode::kFailedPrecondition, "the pool was copied");
  }
  const int64_t tokens = slots.element_count();
  PAGED_RETURN_IF_ERROR(Expect("slots", slots, ffi::DataType::S32, {tokens}));
  const int32_t* slot = Data<int32_t>(slots);
  struct Move {
    const char* from;
    char* to;
    int64_t bytes;
  } moves[2];
  for (int i = 0; i < 2; ++i) {
    const AnyBuffer &fresh = i ? value : key, &stored = i ? values : keys;
    const auto pool = stored.dimensions(), own = fresh.dimensions();
    const auto width = ffi::ByteWidth(stored.element_type());
    if (pool.size() != 4 || own.size() != 3 || own[0] != tokens || own[1] != pool[2] || own[2] != pool[3] ||
        ffi::ByteWidth(fresh.element_type()) != width) {
      return Invalid("new elements of " + Shape(fresh) + " do not fit a pool of " + Shape(stored));
    }
    for (int64_t t = 0; t < tokens; ++t) {
      if (slot[t] >= pool[0] * pool[1]) {
        return Invalid("token " + std::to_string(t) + ": slot " + std::to_string(slot[t]) + " does not exist");
      }
    }
    moves[i] = {Data<char>(fresh), static_cast<char*>((i ? values_out : keys_out)->untyped_data()),
                own[1] * own[2] * static_cast<int64_t>(width)};
  }
  constexpr int64_t kTogether = 64;
  paged::Team team(threads, Helpers(threads, tokens * (moves[0].bytes + moves[1].bytes) / 16));
  team.Run((tokens + kTogether - 1) / kTogether, [&](int64_t task) {
    for (int64_t t = task * kTogether; t < std::min(tokens, (task + 1) * kTogether); ++t) {
      if (slot[t] < 0) continue;
      for (const Move& move : moves) {
        std::memcpy(move.to + slot[t] * move.bytes, move.from + t * move.bytes, move.bytes);
      }
    }
  });
  return Error::Success();
}

Error Attend(ffi::ThreadPool threads, AnyBuffer query, AnyBuffer keys, AnyBuffer values, AnyBuffer kv_lens,
             AnyBuffer query_offsets, AnyBuffer page_offsets, AnyBuffer page_ids, AnyBuffer page_base, AnyBuffer sinks,
             AnyBuffer key_scale, AnyBuffer value_scale, Out out, Out lse, int64_t kind, float scale, float cap,
             int64_t window, int64_t causal) {
  paged::PlainArithmetic plain;
  paged::Pool pool;
  PAGED_RETURN_IF_ERROR(PoolOf(keys, values, kind, &pool));
  const auto dims = query.dimensions();
  if (dims.size() != 3 || dims[2] != pool.key_dim || dims[1] % pool.kv_heads) {
    return Invalid("queries of " + Shape(query) + " do not fit a pool of " + Shape(keys));
  }
  const int64_t tokens = dims[0], heads = dims[1], group = heads / pool.kv_heads;
  if (group > paged::kMostGroup) return Invalid("groups go up to 128 query heads");
  Kind element;
  PAGED_RETURN_IF_ERROR(KindOf(query, &element));
  PAGED_RETURN_IF_ERROR(Expect("out", *out, query.element_type(), {tokens, heads, pool.value_dim}));
  PAGED_RETURN_IF_ERROR(Expect("lse", *lse, ffi::DataType::F32, {tokens, heads}));
  PAGED_RETURN_IF_ERROR(Expect("page_base", page_base, ffi::DataType::S32, {}));
  PAGED_RETURN_IF_ERROR(Expect("key_scale", key_scale, ffi::DataType::F32, {}));
  PAGED_RETURN_IF_ERROR(Expect("value_scale", value_scale, ffi::DataType::F32, {}));
  const bool with_sinks = sinks.element_count() != 0;
  PAGED_RETURN_IF_ERROR(Expect("sinks", sinks, ffi::DataType::F32, {with_sinks ? heads : 0}));
  paged::StepRows rows;
  PAGED_RETURN_IF_ERROR(RowsOf(kv_lens, query_offsets, page_offsets, page_ids, *Data<int32_t>(page_base), pool.pages,
                               tokens, pool, &rows));
  const paged::Options options{
      scale * *Data<float>(key_scale), cap, window, causal != 0, with_sinks ? Data<float>(sinks) : nullptr,
      *Data<float>(value_scale)};
  auto* outputs = static_cast<char*>(out->untyped_data());
  auto* lses = static_cast<float*>(lse->untyped_data());
  const int64_t bytes = paged::BytesOf(element), live = rows.query_offsets[rows.rows];
  const int64_t width = pool.value_dim;
  std::memset(outputs + live * heads * width * bytes, 0, (tokens - live) * heads * width * bytes);
  std::fill(lses + live * heads, lses + tokens * heads, -std::numeric_limits<float>::infinity());
  const auto items = paged::ItemsOf(rows, group);
  int64_t positions = 0;
  for (const auto& item : items) positions += item.tokens * rows.kv_lens[item.row];
  paged::Team team(threads, Helpers(threads, positions * heads * (pool.key_dim + width)));
  const int64_t dim = paged::Padded(pool.key_dim);
  paged::AttendAll(
      team, pool, rows, options, items, group,
      [&](int64_t token, int64_t kv_head, float* to) {
        const int64_t first = token * heads + kv_head * group;
        for (int64_t g = 0; g < group; ++g, to += dim) {
          paged::Read(element, Data<char>(query) + (first + g) * pool.key_dim * bytes, pool.key_dim, to);
          std::fill(to + pool.key_dim, to + dim, 0.0f);
        }
      },
      [&](int64_t token, int64_t kv_head, const float* found, int64_t stride, const float* found_lses) {
        const int64_t first = token * heads + kv_head * group;
        for (int64_t g = 0; g < group; ++g) {
          paged::Write(element, found + g * stride, width, outputs + (first + g) * width * bytes);
          lses[first + g] = found_lses[g];
        }
      });
  return Error::Success();
}

Error Layers(ffi::ThreadPool threads, AnyBuffer x, AnyBuffer keys, AnyBuffer values, AnyBuffer attention_norm,
             AnyBuffer qkv, AnyBuffer output, AnyBuffer mlp_norm, AnyBuffer gate_up, AnyBuffer down, AnyBuffer counter,
             AnyBuffer cos, AnyBuffer sin, AnyBuffer write_slots, AnyBuffer kv_lens, AnyBuffer query_offsets,
             AnyBuffer page_offsets, AnyBuffer page_ids, Out x_out, Out keys_out, Out values_out, Out work,
             int64_t times, int64_t plus, int64_t pool_times, int64_t pool_plus, int64_t count, int64_t num_pages,
             float eps, float scale, float cap, int64_t window, int64_t causal) {
  paged::PlainArithmetic plain;
  if (x.untyped_data() != x_out->untyped_data() || keys.untyped_data() != keys_out->untyped_data() ||
      values.untyped_data() != values_out->untyped_data()) {
    return Error(ffi::ErrorCode::kFailedPrecondition, "the pool or the residual stream was copied");
  }
  paged::LayerCall call{};
  PAGED_RETURN_IF_ERROR(PoolOf(keys, values, static_cast<int64_t>(Kind::kF32), &call.pool));
  const auto heads = qkv.dimensions(), up = gate_up.dimensions(), stream = x.dimensions();
  if (heads.size() != 5 || up.size() != 4 || stream.size() != 2 || heads[2] < 3) {
    return Invalid("qkv, gate_up or x: " + Shape(qkv) + ", " + Shape(gate_up) + ", " + Shape(x));
  }
  const int64_t stacked = heads[0], tokens = stream[0];
  auto& s = call.sizes;
  s = {stream[1], up[2], heads[1], heads[2] - 2, heads[3]};
  if (s.hidden == 0 || s.intermediate == 0) return Invalid("gate_up of " + Shape(gate_up) + " holds nothing");
  if (s.dim % paged::kLanes || s.dim != call.pool.key_dim || s.dim != call.pool.value_dim ||
      s.kv_heads != call.pool.kv_heads || s.group > paged::kMostGroup) {
    return Invalid("qkv of " + Shape(qkv) + " does not fit a pool of " + Shape(keys));
  }
  const auto f32 = ffi::DataType::F32;
  PAGED_RETURN_IF_ERROR(Expect("x", x, f32, {tokens, s.hidden}));
  PAGED_RETURN_IF_ERROR(Expect("attention_norm", attention_norm, f32, {stacked, s.hidden}));
  PAGED_RETURN_IF_ERROR(Expect("qkv", qkv, f32, {stacked, s.kv_heads, s.group + 2, s.dim, s.hidden}));
  PAGED_RETURN_IF_ERROR(Expect("output", output, f32, {stacked, s.hidden, s.attended()}));
  PAGED_RETURN_IF_ERROR(Expect("mlp_norm", mlp_norm, f32, {stacked, s.hidden}));
  PAGED_RETURN_IF_ERROR(Expect("gate_up", gate_up, f32, {stacked, 2, s.intermediate, s.hidden}));
  PAGED_RETURN_IF_ERROR(Expect("down", down, f32, {stacked, s.hidden, s.intermediate}));
  PAGED_RETURN_IF_ERROR(Expect("counter", counter, ffi::DataType::S32, {}));
  PAGED_RETURN_IF_ERROR(Expect("cos", cos, f32, {tokens, s.dim / 2}));
  PAGED_RETURN_IF_ERROR(Expect("sin", sin, f32, {tokens, s.dim / 2}));
  PAGED_RETURN_IF_ERROR(Expect("write_slots", write_slots, ffi::DataType::S32, {tokens}));
  const int64_t turn = *Data<int32_t>(counter);
  const int64_t first = turn * times + plus, first_of_pool = turn * pool_times + pool_plus;
  if (first < 0 || first + count > stacked || first_of_pool < 0 ||
      (first_of_pool + count) * num_pages > call.pool.pages) {
    return Invalid("layers " + std::to_string(first) + " and on, of the pool " + std::to_string(first_of_pool) +
                   " and on, do not exist");
  }
  // The last layer's pages bound those of all.
  PAGED_RETURN_IF_ERROR(RowsOf(kv_lens, query_offsets, page_offsets, page_ids, (first_of_pool + count - 1) * num_pages,
                               num_pages, tokens, call.pool, &call.rows));
  call.write_slots = Data<int32_t>(write_slots);
  for (int64_t t = 0; t < tokens; ++t) {
    if (call.write_slots[t] >= num_pages * call.pool.page_size) {
      return Invalid("token " + std::to_string(t) + ": slot " + std::to_string(call.write_slots[t]) +
                     " does not exist");
    }
  }
  call.eps = eps;
  call.keys = static_cast<float*>(keys_out->untyped_data());
  call.values = static_cast<float*>(values_out->untyped_data());
  call.options = {scale, cap, window, causal != 0, nullptr, 1.0f};
  const int64_t live = call.rows.query_offsets[call.rows.rows];
  if (live == 0) return Error::Success();
  if (static_cast<int64_t>(work->element_count()) < paged::Workspace::Floats(s, live)) return Invalid("work is small");
  const paged::Panels panels{live};
  const paged::Workspace at(static_cast<float*>(work->untyped_data()), s, live);
  const auto items = paged::ItemsOf(call.rows, s.group);
  paged::Team team(threads, Helpers(threads, live * s.hidden * (s.packed() + 3 * s.intermediate)));
  team.Run(panels.count(), [&](int64_t panel) {
    paged::Pack(Data<float>(x), s.hidden, panels, panel, at.x + panels.start(panel, s.hidden));
    paged::Pack(Data<float>(cos), s.dim / 2, panels, panel, at.cos + panels.start(panel, s.dim / 2));
    paged::Pack(Data<float>(sin), s.dim / 2, panels, panel, at.sin + panels.start(panel, s.dim / 2));
  });
  for (int64_t i = 0; i < count; ++i) {
    const int64_t layer = first + i;
    call.rows.page_base = (first_of_pool + i) * num_pages;
    const paged::LayerWeights weights{Data<float>(attention_norm) + layer * s.hidden,
                                      Data<float>(qkv) + layer * s.packed() * s.hidden,
                                      Data<float>(output) + layer * s.hidden * s.attended(),
                                      Data<float>(mlp_norm) + layer * s.hidden,
                                      Data<float>(gate_up) + layer * 2 * s.intermediate * s.hidden,
                                      Data<float>(down) + layer * s.hidden * s.intermediate};
    paged::Layer(team, call, weights, items, panels, at);
  }
  team.Run(panels.count(), [&](int64_t panel) {
    paged::Unpack(at.x + panels.start(panel, s.hidden), s.hidden, panels, panel,
                  static_cast<float*>(x_out->untyped_data()));
  });
  return Error::Success();
}

Error Logits(ffi::ThreadPool threads, AnyBuffer x, AnyBuffer norm, AnyBuffer head, Out logits, Out work, float eps) {
  paged::PlainArithmetic plain;
  const auto dims = head.dimensions();
  if (x.dimensions().size() != 2 || dims.size() != 2) return Invalid("x or head: " + Shape(x) + ", " + Shape(head));
  const int64_t tokens = x.dimensions()[0], vocabulary = dims[0], hidden = dims[1];
  const auto f32 = ffi::DataType::F32;
  PAGED_RETURN_IF_ERROR(Expect("x", x, f32, {tokens, hidden}));
  PAGED_RETURN_IF_ERROR(Expect("norm", norm, f32, {hidden}));
  PAGED_RETURN_IF_ERROR(Expect("head", head, f32, {vocabulary, hidden}));
  PAGED_RETURN_IF_ERROR(Expect("logits", *logits, f32, {tokens, vocabulary}));
  if (static_cast<int64_t>(work->element_count()) < 2 * paged::Panels{tokens}.floats(hidden)) {
    return Invalid("work is small");
  }
  if (hidden == 0) return Invalid("head of " + Shape(head) + " holds nothing");
  if (tokens == 0 || vocabulary == 0) return Error::Success();
  paged::Team team(threads, Helpers(threads, tokens * hidden * vocabulary));
  paged::Vocabulary(team, Data<float>(x), tokens, Data<float>(norm), eps, Data<float>(head), hidden, vocabulary,
                    static_cast<float*>(work->untyped_data()), static_cast<float*>(logits->untyped_data()));
  return Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
// clang-format off: arguments in the order of the functions above, some to a line

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_cpu_append, Append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>().Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_cpu_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>().Ret<AnyBuffer>()
                                  .Attr<int64_t>("kind").Attr<float>("scale").Attr<float>("cap")
                                  .Attr<int64_t>("window").Attr<int64_t>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_cpu_layers, Layers,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>()
                                  .Attr<int64_t>("times").Attr<int64_t>("plus").Attr<int64_t>("pool_times")
                                  .Attr<int64_t>("pool_plus").Attr<int64_t>("count").Attr<int64_t>("num_pages")
                                  .Attr<float>("eps").Attr<float>("scale").Attr<float>("cap")
                                  .Attr<int64_t>("window").Attr<int64_t>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_cpu_logits, Logits,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>().Ret<AnyBuffer>()
                                  .Attr<float>("eps"));

// clang-format on
#pragma GCC visibility pop
