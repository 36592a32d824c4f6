// Building blocks of our kernels: asynchronous copies, swizzled shared tiles, m16n8k16 products.
// Compiled at run time with these set: HEAD_SIZE, GROUP (query heads packed into a tile, all of one kv head: 1, 2, 4
// or 8), GROUPS (of that size per kv head); WINDOW (keys a query sees, itself included;
// 0 for all before it).
#pragma once

typedef unsigned int u32;
typedef unsigned short bf16;

constexpr int THREADS = 128;        // of every block
constexpr int D = HEAD_SIZE;
constexpr int CHUNKS = D / 8;       // 16-byte chunks of a row
constexpr int KSTEPS = D / 16;      // k steps of a product over the head size
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A shared tile is rows of D elements, addressed in bytes. 16-byte chunk c of a row sits at chunk c ^ bits of the row, so
// that eight neighbouring rows fall into different banks; the chunk's bits lie below the row's, hence: the address of chunk
// c ^ x is the address of chunk c, xor x * 16. Tiles start at multiples of 1024 bytes.
constexpr int ROW_BYTES = D * 2;
__device__ __forceinline__ int swizzle(int row) { return CHUNKS >= 8 ? row & 7 : (row >> 1) & (CHUNKS - 1); }
__device__ __forceinline__ u32 chunk_address(int row, int c) { return row * ROW_BYTES + ((c ^ swizzle(row)) << 4); }

// 16 bytes to shared memory, zeros when not inside (the source is not read then).
__device__ __forceinline__ void copy16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}
__device__ __forceinline__ void copy4(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
// Where this lane points ldmatrix inside sixteen tile rows, for k (or n) = 0; step s is at address ^ (s << 5).
// Left operand (rows are rows), and right operand whose inner dimension is the rows (loaded transposed):
__device__ __forceinline__ u32 lane_rows(int lane) { return chunk_address(lane & 15, lane >> 4); }
// Right operand for tile^T (sixteen tile rows become columns): r[0..1] serve columns 0-7, r[2..3] columns 8-15.
__device__ __forceinline__ u32 lane_columns(int lane) {
    return chunk_address((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}
// Sixteen tile rows as a left operand, from where lane_rows() points.
__device__ __forceinline__ void load_left(u32 (&left)[KSTEPS][4], u32 address) {
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) load4(left[s], address ^ (s << 5));
}
__device__ __forceinline__ uint4 shared_load16(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ float4 shared_load4f(u32 address) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ float2 shared_load2f(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ void shared_zero16(u32 address) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ void shared_store4(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
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
// Columns 8j to 8j + 7 of an accumulator as words of a left operand.
template <int N> __device__ __forceinline__ void pack_columns(u32 (&left)[N][4], int j, const float (&c)[4]) {
    left[j / 2][j % 2 * 2] = pack(c[0], c[1]);
    left[j / 2][j % 2 * 2 + 1] = pack(c[2], c[3]);
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
// Word n of lane l of four neighbouring lanes becomes word l of lane n.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int lane) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const u32 other = __shfl_xor_sync(0xffffffffu, lane & 1 ? w[n] : w[n + 1], 1);
        if (lane & 1) w[n] = other;
        else w[n + 1] = other;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const u32 other = __shfl_xor_sync(0xffffffffu, lane & 2 ? w[n] : w[n + 2], 2);
        if (lane & 2) w[n] = other;
        else w[n + 2] = other;
    }
}
template <int N> struct Constant { static constexpr int value = N; };
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// A 16-row accumulator to sixteen rows of a shared tile, as bf16.
__device__ __forceinline__ void stage(u32 rows, const float (&c)[CHUNKS][4], float upper, float lower, int lane) {
    const u32 address = rows + chunk_address(lane >> 2, 0) + 4 * (lane & 3);
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
        shared_store4(address ^ (n << 4), pack(c[n][0] * upper, c[n][1] * upper));
        shared_store4((address ^ (n << 4)) + 8 * ROW_BYTES, pack(c[n][2] * lower, c[n][3] * lower));
    }
}
