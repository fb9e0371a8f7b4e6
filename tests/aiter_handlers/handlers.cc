// jax-aiter's four paged targets on CPU, honest ones.
#include "targets.h"

#pragma GCC visibility push(default)
DEFINE_TARGETS(paged::Honest);
#pragma GCC visibility pop
