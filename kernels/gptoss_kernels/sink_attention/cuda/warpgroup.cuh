// Hopper's warpgroup products (wgmma, sm_90a): c[64, N] += a[64, 16] b[16, N] by four warps
// together.
//
// The right operand b is in shared memory, and the left operand a in shared memory or registers.
// The accumulators c are in registers: warp w has rows 16w to 16w + 15, in the layout of tile.cuh
// with N / 8 blocks of 8 columns. Tiles are those of tile.cuh with D = 64, whose swizzle is the
// 128-byte swizzle of the hardware.
//
// Products run asynchronously while the warps continue:
//   1. Call warpgroup_fence() before the first product after a change of the registers of a or c.
//   2. Start the products, then call warpgroup_commit(). They form a group. Groups finish in order.
//   3. Call finish_products<N>(c...) before reading c or writing the registers of a.
// Between 2 and 3 the compiler must not access these registers. It does not know this, so
// fence_accumulators() prevents it. If ptxas has too few registers, it prints a warning and
// serializes all products. The kernel is then correct, but slow.
#pragma once
#include "tile.cuh"

typedef unsigned long long u64;

// -- descriptors and fences -----------------------------------------------------------------------

// Return wgmma's descriptor of a tile of 128-byte rows ("Matrix Descriptor" in the PTX manual):
//   bits 0-13   address / 16
//   bits 16-29  leading dimension offset / 16; not used with this swizzle, 1 by convention
//   bits 32-45  stride offset / 16: from eight rows to the next eight, 1024 bytes
//   bits 62-63  1: 128-byte swizzle
// The tile starts at a multiple of eight rows, where the pattern of the swizzle starts. The address
// is in the low bits, so descriptor + n describes the tile n * 16 bytes later: + 2 for 16 elements
// of a row, and + (n * ROW_BYTES >> 4) for n rows, if n is a multiple of eight.
__device__ __forceinline__ u64 tile_descriptor(u32 tile) {
    const u64 address = (tile & 0x3ffff) >> 4;
    const u64 leading_offset = (u64)1 << 16;
    const u64 stride_offset = (u64)(1024 >> 4) << 32;
    const u64 swizzle_128_bytes = (u64)1 << 62;
    return address | leading_offset | stride_offset | swizzle_128_bytes;
}

// Return the number to add to a tile's descriptor for the tile that begins `rows` rows later.
constexpr u32 descriptor_rows(int rows) { return rows * ROW_BYTES >> 4; }

__device__ __forceinline__ void warpgroup_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most N groups are in flight.
template <int N> __device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Make shared memory that this thread wrote (also by cp.async) visible to the tensor cores and TMA,
// which use another path, the "async proxy". A barrier must follow, so that the writes of all
// threads are visible.
__device__ __forceinline__ void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -- accumulators as operands of asm --------------------------------------------------------------

#define ACCUMULATOR_BLOCK(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])

#define ACCUMULATORS_32(c)                                                          \
    ACCUMULATOR_BLOCK(c, 0), ACCUMULATOR_BLOCK(c, 1), ACCUMULATOR_BLOCK(c, 2),      \
    ACCUMULATOR_BLOCK(c, 3)
#define ACCUMULATORS_48(c) ACCUMULATORS_32(c), ACCUMULATOR_BLOCK(c, 4), ACCUMULATOR_BLOCK(c, 5)
#define ACCUMULATORS_64(c) ACCUMULATORS_48(c), ACCUMULATOR_BLOCK(c, 6), ACCUMULATOR_BLOCK(c, 7)

#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_24 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_32 NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"

// Prevent the compiler from moving reads of c before this point. It does not know that the tensor
// cores write c until then.
__device__ __forceinline__ void fence_accumulators(float (&c)[4][4]) {
    asm volatile("" : ACCUMULATORS_32(c)::"memory");
}

__device__ __forceinline__ void fence_accumulators(float (&c)[6][4]) {
    asm volatile("" : ACCUMULATORS_48(c)::"memory");
}

__device__ __forceinline__ void fence_accumulators(float (&c)[8][4]) {
    asm volatile("" : ACCUMULATORS_64(c)::"memory");
}

// Wait until at most N groups of products are in flight. The accumulators `c` must belong to
// finished groups. They can be read afterwards.
template <int N, class... C> __device__ __forceinline__ void finish_products(C&... c) {
    warpgroup_wait<N>();
    (fence_accumulators(c), ...);
}

// -- single products, 16 deep ---------------------------------------------------------------------
//
// ABt is a times b transposed: the inner dimension is along the rows of both tiles (scores: rows of
// Q times rows of K). AB is a times b: the inner dimension is across the rows of b's tile (output:
// P times V). The number in the name is N. If `add` is false, c is overwritten.
//
// The immediate operands at the end of the instructions are: factor of a, factor of b (1 or -1),
// then for each operand in shared memory whether it is transposed.

__device__ __forceinline__ void wgmma_ABt_64(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : ACCUMULATORS_64(c)
                 : "l"(a), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void wgmma_ABt_48(float (&c)[6][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
                 "{" NAMES_24 "}, {%24,%25,%26,%27}, %28, p, 1, 1, 0;}"
                 : ACCUMULATORS_48(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void wgmma_ABt_32(float (&c)[4][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{" NAMES_16 "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
                 : ACCUMULATORS_32(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void wgmma_AB_64(float (&c)[8][4], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{" NAMES_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : ACCUMULATORS_64(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// -- whole products, started as one group ---------------------------------------------------------

// Start c = a b^T over the head size. The caller has called warpgroup_fence().
__device__ __forceinline__ void begin_ABt(float (&c)[8][4], u64 a, u64 b) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) wgmma_ABt_64(c, a + 2 * s, b + 2 * s, s > 0);
    warpgroup_commit();
}

__device__ __forceinline__ void begin_ABt(float (&c)[6][4], const u32 (&a)[KSTEPS][4], u64 b) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) wgmma_ABt_48(c, a[s], b + 2 * s, s > 0);
    warpgroup_commit();
}

__device__ __forceinline__ void begin_ABt(float (&c)[4][4], const u32 (&a)[KSTEPS][4], u64 b) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) wgmma_ABt_32(c, a[s], b + 2 * s, s > 0);
    warpgroup_commit();
}

// Start c = a b, or c += a b if `add`, over 16 N rows of b's tile. Calls warpgroup_fence().
template <int N>
__device__ __forceinline__ void begin_AB(float (&c)[8][4], const u32 (&a)[N][4], u64 b, bool add) {
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < N; s++) wgmma_AB_64(c, a[s], b + s * descriptor_rows(16), add || s > 0);
    warpgroup_commit();
}
