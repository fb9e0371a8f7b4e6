// In CUTLASS's place: of its collective builders, FA3 takes the layouts of shared memory alone. The others, for chips that
// these modules are not built for, are two thirds of what the compiler would read.
#pragma once
#include "cutlass/gemm/collective/builders/sm90_common.inl"
