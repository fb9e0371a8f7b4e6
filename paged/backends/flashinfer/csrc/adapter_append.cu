// The append kernel takes its operands in XLA's order; it only has to be exported.
#include "tvm_ffi_utils.h"

void append_paged_kv_cache(TensorView key, TensorView value, TensorView batch_indices, TensorView positions,
                           TensorView k_pool, TensorView v_pool, TensorView indices, TensorView indptr,
                           TensorView last_page_len, int64_t layout);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_append, append_paged_kv_cache);
