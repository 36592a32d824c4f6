// Hopper's warpgroup products (wgmma, sm_90a): four warps, 64 rows x 64 columns x 16 deep, right operand in shared memory.
// Tiles are as in tile.cuh with D = 64, which is the hardware's 128-byte swizzle.
#pragma once
#include "tile.cuh"

typedef unsigned long long u64;

// Descriptor of a tile of 128-byte rows: eight-row groups 1024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ u64 describe(u32 tile) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// What cp.async wrote becomes visible to the tensor cores; follow with a barrier.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define ACCUMULATORS(c)                                                                                                     \
    "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
    "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
    "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), \
    "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
#define ACCUMULATOR_NAMES                                                                           \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
    "%25,%26,%27,%28,%29,%30,%31}"

// c (+)= rows of left (k step s) times rows of right, transposed: both tiles have the inner dimension along a row.
__device__ __forceinline__ void warpgroup_rows(float (&c)[8][4], u64 left, u64 right, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ACCUMULATOR_NAMES ", %32, %33, p, 1, 1, 0, 0;}"
                 : ACCUMULATORS(c) : "l"(left), "l"(right), "r"((int)add));
}
// c (+)= left (registers) times sixteen rows of right: the rows are the inner dimension.
__device__ __forceinline__ void warpgroup_inner(float (&c)[8][4], const u32 (&left)[4], u64 right, bool add = true) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ACCUMULATOR_NAMES
                 ", {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : ACCUMULATORS(c)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"((int)add));
}
#define ACCUMULATORS_48(c)                                                                                                  \
    "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
    "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
    "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3])
// c (+)= left (registers) times 48 rows of right, transposed.
__device__ __forceinline__ void warpgroup_rows_48(float (&c)[6][4], const u32 (&left)[4], u64 right, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, "
                 "{%24,%25,%26,%27}, %28, p, 1, 1, 0;}"
                 : ACCUMULATORS_48(c) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"((int)add));
}
__device__ __forceinline__ void settle(float (&c)[6][4]) { asm volatile("" : ACCUMULATORS_48(c)::"memory"); }
#define ACCUMULATORS_32(c)                                                                                                  \
    "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
    "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
// c (+)= left (registers) times 32 rows of right, transposed.
__device__ __forceinline__ void warpgroup_rows_32(float (&c)[4][4], const u32 (&left)[4], u64 right, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
                 : ACCUMULATORS_32(c) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"((int)add));
}
__device__ __forceinline__ void settle(float (&c)[4][4]) { asm volatile("" : ACCUMULATORS_32(c)::"memory"); }
// Whole products over the head size, begun after a fence: c = rows of left times rows of right, transposed.
__device__ __forceinline__ void begin_rows(float (&c)[8][4], u64 left, u64 right) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) warpgroup_rows(c, left + 2 * s, right + 2 * s, s > 0);
    warpgroup_commit();
}
__device__ __forceinline__ void begin_rows(float (&c)[6][4], const u32 (&left)[KSTEPS][4], u64 right) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) warpgroup_rows_48(c, left[s], right + 2 * s, s > 0);
    warpgroup_commit();
}
__device__ __forceinline__ void begin_rows(float (&c)[4][4], const u32 (&left)[KSTEPS][4], u64 right) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) warpgroup_rows_32(c, left[s], right + 2 * s, s > 0);
    warpgroup_commit();
}
// Values that the tensor cores write behind the compiler's back: nothing reads c before this point.
__device__ __forceinline__ void settle(float (&c)[8][4]) { asm volatile("" : ACCUMULATORS(c)::"memory"); }
// A whole product over 16 N rows of right, begun: c (+)= left times them.
template <int N> __device__ __forceinline__ void begin_inner(float (&c)[8][4], const u32 (&left)[N][4], u64 right, bool add) {
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < N; s++) warpgroup_inner(c, left[s], right + s * (16 * ROW_BYTES >> 4), add || s > 0);
    warpgroup_commit();
}
// Waits until no more than N products are under way; the results of the others may be read from here on.
template <int N, class... C> __device__ __forceinline__ void finish(C&... c) {
    warpgroup_wait<N>();
    (settle(c), ...);
}
