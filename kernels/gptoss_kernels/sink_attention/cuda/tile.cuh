// Building blocks of the window kernels: asynchronous copies, swizzled shared tiles, m16n8k16 products.
// Compiled at run time with these set: HEAD_SIZE, GROUP (query heads packed into a tile, all of one kv head: 1, 2, 4
// or 8), GROUPS (of that size per kv head), WINDOW (keys a query sees, itself included).
#pragma once

typedef unsigned int u32;
typedef unsigned short bf16;

constexpr int D = HEAD_SIZE;
constexpr int CHUNKS = D / 8;       // 16-byte chunks of a row
constexpr int KSTEPS = D / 16;      // k steps of a product over the head size
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Element offset of 16-byte chunk c of a row: eight neighbouring rows fall into different banks.
__device__ __forceinline__ int swizzled(int row, int c) {
    if constexpr (CHUNKS >= 8) return row * D + ((c ^ (row & 7)) << 3);
    else return row * D + ((c ^ ((row >> 1) & (CHUNKS - 1))) << 3);
}

// 16 bytes to shared memory, zeros when not inside.
__device__ __forceinline__ void copy16(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0));
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 4 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void load4(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void load4_transposed(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
// Left operand: rows row0..row0+15, columns 16k..16k+15 of a tile.
__device__ __forceinline__ void load_left(u32 (&r)[4], const bf16* tile, int row0, int k, int lane) {
    load4(r, tile + swizzled(row0 + (lane & 15), 2 * k + (lane >> 4)));
}
// Right operand for tile^T: sixteen tile rows become columns. r[0..1] serve columns 0-7, r[2..3] columns 8-15.
__device__ __forceinline__ void load_rows_as_columns(u32 (&r)[4], const bf16* tile, int row0, int k, int lane) {
    load4(r, tile + swizzled(row0 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
}
// Right operand for tile: sixteen tile rows are the inner dimension, columns 16n..16n+15.
__device__ __forceinline__ void load_rows_as_inner(u32 (&r)[4], const bf16* tile, int row0, int n, int lane) {
    load4_transposed(r, tile + swizzled(row0 + (lane & 15), 2 * n + (lane >> 4)));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// A row lives in four neighbouring lanes.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// One 16x64-shaped accumulator to 16 rows of a shared tile, as bf16.
__device__ __forceinline__ void stage(bf16* tile, int row0, const float (&c)[CHUNKS][4], float upper, float lower, int lane) {
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
        int row = row0 + (lane >> 2);
        *(u32*)(tile + swizzled(row, n) + 2 * (lane & 3)) = pack(c[n][0] * upper, c[n][1] * upper);
        *(u32*)(tile + swizzled(row + 8, n) + 2 * (lane & 3)) = pack(c[n][2] * lower, c[n][3] * lower);
    }
}
