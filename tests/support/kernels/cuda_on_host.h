// Definitions for compiling adapter_merge.cu with a C++ compiler of the host. A kernel is then a function. It is called
// once for every thread, with the thread's indices in the variables below.
#include <cmath>
#include <cstdint>
#include <cstring>

#define KERNEL static void
#define __restrict__

struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    int x;
};
static Index blockIdx, blockDim, threadIdx;

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// Compiled with -ffp-contract=off, so that each of the three rounds as its name says.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// cvt.rn.bf16.f32: the nearest, ties to even.
static inline unsigned bf16_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
