// The FFI targets over `attention.h`, with what the vendor's handlers refuse and, beyond that, what they would only
// suffer from. `DEFINE_TARGETS(Rules)` defines the four symbols.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "attention.h"
#include "xla/ffi/api/ffi.h"

namespace paged {

namespace ffi = xla::ffi;

inline ffi::Error Refuse(ffi::ErrorCode code, std::string_view target, const std::string& why) {
  return ffi::Error(code, std::string(target) + ": " + why);
}

inline ffi::Error Invalid(std::string_view target, const std::string& why) {
  return Refuse(ffi::ErrorCode::kInvalidArgument, target, why);
}

// The decode configurations of jax-aiter's build: head dim 128, pages of 16 tokens, contexts up to 16,384 tokens.
struct Compiled {
  const char* name;
  ffi::DataType type;
  int64_t group;
};
constexpr Compiled kCompiled[] = {
    {"pa_ragged_25d61c41e3ea0a43f18af1eeb51b5190", ffi::DataType::BF16, 1},
    {"pa_ragged_6134fed300da65c9cb53759af7113a35", ffi::DataType::BF16, 4},
    {"pa_ragged_859f529079ac9055c7547383fd14ffb7", ffi::DataType::BF16, 8},
    {"pa_ragged_dc92febd4c0b7a92e12d6a1ad46f6f4a", ffi::DataType::F16, 1},
    {"pa_ragged_794afaec0012b94f7d8628acbb0e0a30", ffi::DataType::F16, 4},
    {"pa_ragged_945f377dd7a9b4dd387abd5fb1154b77", ffi::DataType::F16, 8},
};

inline ffi::Error CheckPools(std::string_view target, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, Geometry* out) {
  const auto dims = k.dimensions();
  if (dims.size() != 4) return Invalid(target, "the pool must be (pages, tokens per page, KV heads, head dim)");
  const auto other = v.dimensions();
  if (other.size() != 4 || !std::equal(dims.begin(), dims.end(), other.begin())) {
    return Invalid(target, "k_pool and v_pool have different shapes");
  }
  if (v.element_type() != k.element_type()) return Invalid(target, "k_pool and v_pool have different element types");
  *out = Geometry{dims[0], dims[1], dims[2], dims[3]};
  return ffi::Error::Success();
}

inline ffi::Error CheckScales(std::string_view target, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v) {
  for (const auto* scale : {&k, &v}) {
    if (scale->element_type() != ffi::DataType::F32 || scale->element_count() != 1) {
      return Invalid(target, "k_scale and v_scale must be one float32 each");
    }
    if (*static_cast<const float*>(scale->untyped_data()) != 1.0f) return Invalid(target, "a scale is not 1");
  }
  return ffi::Error::Success();
}

// The page list: offsets that start at 0 and give every row at least one page, ids of pages that exist, over the whole
// list, and at least one entry past its end, which the vendor's prefill reads ahead.
inline ffi::Error CheckPages(std::string_view target, const Geometry& pool, int64_t rows, const ffi::AnyBuffer& indptr,
                             const ffi::AnyBuffer& indices, const ffi::AnyBuffer& last) {
  for (const auto* buffer : {&indptr, &indices, &last}) {
    if (buffer->element_type() != ffi::DataType::S32) return Invalid(target, "page metadata must be int32");
  }
  if (static_cast<int64_t>(indptr.element_count()) != rows + 1) return Invalid(target, "kv_indptr must have rows + 1");
  if (static_cast<int64_t>(last.element_count()) != rows) return Invalid(target, "kv_last_page_lens must have rows");
  const auto* starts = static_cast<const int32_t*>(indptr.untyped_data());
  const auto* pages = static_cast<const int32_t*>(indices.untyped_data());
  const auto* lens = static_cast<const int32_t*>(last.untyped_data());
  const int64_t listed = indices.element_count();
  if (starts[0] != 0) return Invalid(target, "kv_indptr must start at 0");
  for (int64_t r = 0; r < rows; ++r) {
    const std::string where = "row " + std::to_string(r) + " ";
    if (starts[r + 1] <= starts[r]) return Invalid(target, where + "is empty: its reduction would read out of bounds");
    if (lens[r] < 1 || lens[r] > pool.page_size) {
      return Invalid(target, where + "has a last page length of " + std::to_string(lens[r]));
    }
  }
  if (starts[rows] >= listed) return Invalid(target, "the page list ends where its use does, and is read one past it");
  for (int64_t i = 0; i < listed; ++i) {
    if (pages[i] < 0 || pages[i] >= pool.pages) {
      return Refuse(ffi::ErrorCode::kOutOfRange, target, "entry " + std::to_string(i) + " of the page list is page " +
                                                             std::to_string(pages[i]) + " of " +
                                                             std::to_string(pool.pages));
    }
  }
  return ffi::Error::Success();
}

#define PAGED_RETURN_IF_ERROR(expression) \
  if (auto error = (expression); error.failure()) return error

template <typename Rules>
ffi::Error AppendTarget(ffi::AnyBuffer k_new, ffi::AnyBuffer v_new, ffi::AnyBuffer slots, ffi::AnyBuffer k_scale,
                        ffi::AnyBuffer v_scale, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                        ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
                        std::string_view kv_cache_dtype) {
  constexpr std::string_view kName = "AppendKvJA";
  if (k_pool.untyped_data() != k_out->untyped_data() || v_pool.untyped_data() != v_out->untyped_data()) {
    return Refuse(ffi::ErrorCode::kFailedPrecondition, kName, "input_output_aliases was not honoured");
  }
  Geometry pool;
  PAGED_RETURN_IF_ERROR(CheckPools(kName, k_pool, v_pool, &pool));
  PAGED_RETURN_IF_ERROR(CheckScales(kName, k_scale, v_scale));
  if (kv_cache_dtype != "auto") return Refuse(ffi::ErrorCode::kUnimplemented, kName, "kv_cache_dtype is not auto");
  for (const auto* fresh : {&k_new, &v_new}) {
    const auto dims = fresh->dimensions();
    if (dims.size() != 3 || dims[1] != pool.kv_heads || dims[2] != pool.head_dim) {
      return Invalid(kName, "new keys and values must be (tokens, KV heads, head dim) of the pool");
    }
    if (fresh->element_type() != k_pool.element_type()) return Invalid(kName, "new tokens have another element type");
  }
  const int64_t tokens = k_new.dimensions()[0];
  if (v_new.dimensions()[0] != tokens) return Invalid(kName, "there are not as many values as keys");
  if (slots.element_type() != ffi::DataType::S32) return Invalid(kName, "slot_mapping must be int32");
  if (static_cast<int64_t>(slots.element_count()) != tokens) return Invalid(kName, "slot_mapping must have tokens");
  const auto* slot = static_cast<const int32_t*>(slots.untyped_data());
  for (int64_t i = 0; i < tokens; ++i) {
    if (slot[i] >= pool.Slots()) {
      return Refuse(ffi::ErrorCode::kOutOfRange, kName, "token " + std::to_string(i) + " is aimed at slot " +
                                                            std::to_string(slot[i]) + " of " +
                                                            std::to_string(pool.Slots()));
    }
  }
  const int width = static_cast<int>(ffi::ByteWidth(k_pool.element_type()));
  Append<Rules>(pool, k_new.untyped_data(), slot, tokens, width, k_out->untyped_data());
  Append<Rules>(pool, Rules::NewValues(k_new.untyped_data(), v_new.untyped_data()), slot, tokens, width,
                v_out->untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error CheckQuery(std::string_view target, const Geometry& pool, const ffi::AnyBuffer& query,
                             const ffi::AnyBuffer& k_pool, const ffi::AnyBuffer& out) {
  const auto dims = query.dimensions();
  if (dims.size() != 3 || dims[2] != pool.head_dim) return Invalid(target, "query must be (tokens, heads, head dim)");
  if (pool.kv_heads == 0 || dims[1] % pool.kv_heads != 0) return Invalid(target, "query heads do not divide");
  const auto type = query.element_type();
  if (type != ffi::DataType::BF16 && type != ffi::DataType::F16) return Invalid(target, "query must be 16-bit");
  if (k_pool.element_type() != type || out.element_type() != type) {
    return Invalid(target, "query, pools and output must share an element type");
  }
  return ffi::Error::Success();
}

template <typename Rules>
ffi::Error DecodeTarget(ffi::AnyBuffer query, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::AnyBuffer indptr,
                        ffi::AnyBuffer indices, ffi::AnyBuffer last, ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale,
                        ffi::AnyBuffer workspace, ffi::Result<ffi::AnyBuffer> out, float scale, float logits_soft_cap,
                        int64_t max_num_partitions, std::string_view func_name) {
  constexpr std::string_view kName = "PagedAttentionJA";
  Geometry pool;
  PAGED_RETURN_IF_ERROR(CheckPools(kName, k_pool, v_pool, &pool));
  PAGED_RETURN_IF_ERROR(CheckScales(kName, k_scale, v_scale));
  PAGED_RETURN_IF_ERROR(CheckQuery(kName, pool, query, k_pool, *out));
  const int64_t rows = query.dimensions()[0], heads = query.dimensions()[1];
  PAGED_RETURN_IF_ERROR(CheckPages(kName, pool, rows, indptr, indices, last));
  const Compiled* kernel = nullptr;
  for (const auto& one : kCompiled) kernel = func_name == one.name ? &one : kernel;
  if (kernel == nullptr) {
    return Refuse(ffi::ErrorCode::kFailedPrecondition, kName,
                  "kernel configuration '" + std::string(func_name) + "' is not compiled into this module");
  }
  if (kernel->type != query.element_type() || kernel->group != heads / pool.kv_heads || pool.head_dim != 128 ||
      pool.page_size != 16 || max_num_partitions > 64) {
    return Refuse(ffi::ErrorCode::kFailedPrecondition, kName, "func_name is another configuration's");
  }
  const int64_t elements = rows * heads * max_num_partitions;
  const int64_t need = elements * (8 + 2 * pool.head_dim);
  if (workspace.element_type() != ffi::DataType::U8 || static_cast<int64_t>(workspace.size_bytes()) < need) {
    return Invalid(kName, "workspace is " + std::to_string(workspace.size_bytes()) + " bytes, need " +
                              std::to_string(need));
  }
  const auto* starts = static_cast<const int32_t*>(indptr.untyped_data());
  for (int64_t r = 0; r < rows; ++r) {
    if ((starts[r + 1] - starts[r]) * pool.page_size > max_num_partitions * kPartition) {
      return Invalid(kName, "row " + std::to_string(r) + " is longer than max_num_partitions allows");
    }
  }
  // logits_soft_cap is accepted and ignored, as the vendor's build does.
  const auto run = query.element_type() == ffi::DataType::BF16 ? &Decode<BFloat16, Rules> : &Decode<Float16, Rules>;
  run(pool, rows, heads, query.untyped_data(), k_pool.untyped_data(), v_pool.untyped_data(), starts,
      static_cast<const int32_t*>(indices.untyped_data()), static_cast<const int32_t*>(last.untyped_data()), scale,
      max_num_partitions, workspace.untyped_data(), out->untyped_data());
  return ffi::Error::Success();
}

template <typename Rules>
ffi::Error PrefillTarget(ffi::AnyBuffer query, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::AnyBuffer offsets,
                         ffi::AnyBuffer indptr, ffi::AnyBuffer indices, ffi::AnyBuffer last,
                         ffi::Result<ffi::AnyBuffer> out, float scale, float logits_soft_cap, int64_t max_seqlen_q,
                         int64_t max_seqlen_k, bool causal, int64_t window_size_left, int64_t window_size_right) {
  constexpr std::string_view kName = "PagedPrefillJA";
  Geometry pool;
  PAGED_RETURN_IF_ERROR(CheckPools(kName, k_pool, v_pool, &pool));
  PAGED_RETURN_IF_ERROR(CheckQuery(kName, pool, query, k_pool, *out));
  if (offsets.element_type() != ffi::DataType::S32) return Invalid(kName, "cu_seqlens_q must be int32");
  const int64_t tokens = query.dimensions()[0], heads = query.dimensions()[1];
  const int64_t rows = static_cast<int64_t>(offsets.element_count()) - 1;
  if (rows < 1) return Invalid(kName, "cu_seqlens_q must have rows + 1 entries");
  PAGED_RETURN_IF_ERROR(CheckPages(kName, pool, rows, indptr, indices, last));
  if (logits_soft_cap != 0.0f || (pool.page_size != 1 && pool.page_size != 16 && pool.page_size != 1024)) {
    return Refuse(ffi::ErrorCode::kFailedPrecondition, kName, "no batch-prefill kernel matches this configuration");
  }
  const auto* begins = static_cast<const int32_t*>(offsets.untyped_data());
  const auto* starts = static_cast<const int32_t*>(indptr.untyped_data());
  if (begins[0] != 0) return Invalid(kName, "cu_seqlens_q must start at 0");
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t queries = begins[r + 1] - begins[r], held = (starts[r + 1] - starts[r]) * pool.page_size;
    const std::string where = "row " + std::to_string(r) + " ";
    if (queries < 0 || begins[r + 1] > tokens) return Invalid(kName, where + "has no valid cu_seqlens_q");
    if (queries > max_seqlen_q) return Invalid(kName, where + "has more queries than max_seqlen_q");
    if (held - pool.page_size >= std::max<int64_t>(max_seqlen_k, 1)) {
      return Invalid(kName, where + "is longer than max_seqlen_k");
    }
  }
  const auto run = query.element_type() == ffi::DataType::BF16 ? &Prefill<BFloat16, Rules> : &Prefill<Float16, Rules>;
  run(pool, tokens, rows, heads, query.untyped_data(), k_pool.untyped_data(), v_pool.untyped_data(), begins, starts,
      static_cast<const int32_t*>(indices.untyped_data()), static_cast<const int32_t*>(last.untyped_data()), scale,
      causal, window_size_left, window_size_right, out->untyped_data());
  return ffi::Error::Success();
}

// Adds rows in place; rows out of range are skipped.
inline ffi::Error AliasProbeTarget(ffi::AnyBuffer pool, ffi::AnyBuffer rows, ffi::AnyBuffer values,
                                   ffi::Result<ffi::AnyBuffer> out) {
  constexpr std::string_view kName = "KvAliasProbeJA";
  if (pool.untyped_data() != out->untyped_data()) {
    return Refuse(ffi::ErrorCode::kFailedPrecondition, kName, "input_output_aliases was not honoured");
  }
  const auto type = pool.element_type();
  if (values.element_type() != type || (type != ffi::DataType::F32 && type != ffi::DataType::BF16)) {
    return Invalid(kName, "pool and vals must be float32 or bfloat16, and the same");
  }
  if (rows.element_type() != ffi::DataType::S32) return Invalid(kName, "row_idx must be int32");
  const int64_t count = values.dimensions()[0], held = pool.dimensions()[0];
  const int64_t width = count == 0 ? 0 : static_cast<int64_t>(values.element_count()) / count;
  if (static_cast<int64_t>(rows.element_count()) != count) return Invalid(kName, "row_idx must have a row of vals");
  const auto* index = static_cast<const int32_t*>(rows.untyped_data());
  for (int64_t i = 0; i < count; ++i) {
    if (index[i] < 0 || index[i] >= held) continue;
    for (int64_t j = 0; j < width; ++j) {
      if (type == ffi::DataType::F32) {
        static_cast<float*>(out->untyped_data())[index[i] * width + j] +=
            static_cast<const float*>(values.untyped_data())[i * width + j];
      } else {
        auto* word = static_cast<uint16_t*>(out->untyped_data()) + index[i] * width + j;
        const auto added = static_cast<const uint16_t*>(values.untyped_data())[i * width + j];
        *word = BFloat16::Store(BFloat16::Load(*word) + BFloat16::Load(added));
      }
    }
  }
  return ffi::Error::Success();
}

#undef PAGED_RETURN_IF_ERROR

}  // namespace paged

// The vendor's binding without its contexts (stream, device ordinal), which a CPU does not have.
#define DEFINE_TARGETS(Rules)                                                                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
      AppendKvJA, paged::AppendTarget<Rules>,                                                                        \
      xla::ffi::Ffi::Bind()                                                                                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>()                          \
          .Attr<std::string_view>("kv_cache_dtype"));                                                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
      PagedAttentionJA, paged::DecodeTarget<Rules>,                                                                  \
      xla::ffi::Ffi::Bind()                                                                                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Ret<xla::ffi::AnyBuffer>().Attr<float>("scale").Attr<float>("logits_soft_cap")                            \
          .Attr<int64_t>("max_num_partitions").Attr<std::string_view>("func_name"));                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
      PagedPrefillJA, paged::PrefillTarget<Rules>,                                                                   \
      xla::ffi::Ffi::Bind()                                                                                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()                          \
          .Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Attr<float>("scale")                                \
          .Attr<float>("logits_soft_cap").Attr<int64_t>("max_seqlen_q").Attr<int64_t>("max_seqlen_k")                \
          .Attr<bool>("causal").Attr<int64_t>("window_size_left").Attr<int64_t>("window_size_right"));               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
      KvAliasProbeJA, paged::AliasProbeTarget,                                                                       \
      xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()         \
          .Ret<xla::ffi::AnyBuffer>())
