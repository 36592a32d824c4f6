// dQ, delta = rowsum(dO * O) and each item's share of dsinks. Grid: items * heads / GROUP blocks of 128 threads.
#include "march.cuh"

#ifndef RESIDENT
#define RESIDENT 2
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_backward_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                  const float* __restrict__ sinks, const bf16* __restrict__ o, const float* __restrict__ lse,
                  const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q, float* __restrict__ delta,
                  float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads, float scale, int chunk) {
    extern __shared__ __align__(128) unsigned char memory[];
    bf16* ring_k = (bf16*)memory;
    bf16* ring_v = ring_k + RING * 16 * D;
    bf16* rows_q = ring_v + RING * 16 * D;                     // two tiles of Q, then of dQ
    bf16* rows_g = rows_q + 2 * ROWS * D;                      // two tiles of dO
    float* row_delta = (float*)(rows_g + 2 * ROWS * D);        // [ROWS]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const int end = min(item.first + chunk, item.end);
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E, scale_log2 = scale * LOG2E;
    float sink_share = 0.f;

    int base = (item.first - item.start) / 16;
    load_keys(ring_k, ring_v, k, v, item, max(0, base - HALO), base + NEW, kv_heads, kv_head, thread);
    load_rows(rows_q, q, item.first, item.end, heads, head0, thread);
    load_rows(rows_g, grad_o, item.first, item.end, heads, head0, thread);
    commit();
    int buffer = 0;
    for (int p0 = item.first; p0 < end; p0 += TILE, base += NEW, buffer ^= 1) {
        uint4 out[CHUNKS];                                     // O: eight (CHUNKS) lanes share a row
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int index = i * 32 + lane, row = warp * 32 + index / CHUNKS, p = p0 + tile_position(row);
            out[i] = make_uint4(0, 0, 0, 0);
            if (p < item.end)
                out[i] = *(const uint4*)(o + ((long long)p * heads + head0 + row % GROUP) * D + index % CHUNKS * 8);
        }
        float row_lse[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = warp * 32 + m * 16 + h * 8 + (lane >> 2), p = p0 + tile_position(row);
                row_lse[m][h] = p < item.end ? lse[(long long)p * heads + head0 + row % GROUP] * LOG2E : infinity();
            }
        if (p0 + TILE < end) {
            load_keys(ring_k, ring_v, k, v, item, base + NEW, base + 2 * NEW, kv_heads, kv_head, thread);
            load_rows(rows_q + (buffer ^ 1) * ROWS * D, q, p0 + TILE, item.end, heads, head0, thread);
            load_rows(rows_g + (buffer ^ 1) * ROWS * D, grad_o, p0 + TILE, item.end, heads, head0, thread);
        }
        commit();
        wait<1>();
        __syncthreads();
        bf16* tile_q = rows_q + buffer * ROWS * D;
        const bf16* tile_g = rows_g + buffer * ROWS * D;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int index = i * 32 + lane, row = warp * 32 + index / CHUNKS;
            const uint4 g = *(const uint4*)(tile_g + swizzled(row, index % CHUNKS));
            const u32 a[4] = {out[i].x, out[i].y, out[i].z, out[i].w}, c[4] = {g.x, g.y, g.z, g.w};
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sum = fmaf(__int_as_float(a[e] << 16), __int_as_float(c[e] << 16), sum);
                sum = fmaf(__int_as_float(a[e] & 0xffff0000u), __int_as_float(c[e] & 0xffff0000u), sum);
            }
#pragma unroll
            for (int s = 1; s < CHUNKS; s <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, s);
            if (index % CHUNKS == 0) row_delta[row] = sum;
        }
        __syncwarp();
        u32 query[2][KSTEPS][4], grad[2][KSTEPS][4];
        float d[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                load_left(query[m][s], tile_q, warp * 32 + m * 16, s, lane);
                load_left(grad[m][s], tile_g, warp * 32 + m * 16, s, lane);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = warp * 32 + m * 16 + h * 8 + (lane >> 2), p = p0 + tile_position(row);
                d[m][h] = row_delta[row];
                if (p < item.end) {
                    sink_share -= exp2_approx(sink - row_lse[m][h]) * d[m][h];
                    if ((lane & 3) == 0) delta[(long long)p * heads + head0 + row % GROUP] = d[m][h];
                }
            }
        }
        float dq[2][CHUNKS][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const int block = base + b - HALO;
            if (block < 0 || !concerns(b, warp)) continue;
            const int slot = (u32)block % RING * 16;
            float x[2][2][4] = {}, dp[2][2][4] = {};
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                u32 key[4], value[4];
                load_rows_as_columns(key, ring_k, slot, s, lane);
                load_rows_as_columns(value, ring_v, slot, s, lane);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply(x[m][0], query[m][s], key[0], key[1]);
                    multiply(x[m][1], query[m][s], key[2], key[3]);
                    multiply(dp[m][0], grad[m][s], value[0], value[1]);
                    multiply(dp[m][1], grad[m][s], value[2], value[3]);
                }
            }
            u32 ds[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float p = exp2_approx(fmaf(x[m][n][e], scale_log2, -row_lse[m][e >> 1]));
                        if (needs_mask(b)) {
                            int row = warp * 32 + m * 16 + (lane >> 2) + (e >> 1) * 8;
                            int column = (b - HALO) * 16 + n * 8 + 2 * (lane & 3) + (e & 1);
                            if (!visible(row, column)) p = 0.f;
                        }
                        x[m][n][e] = p * (dp[m][n][e] - d[m][e >> 1]);
                    }
                ds[m][0] = pack(x[m][0][0], x[m][0][1]);
                ds[m][1] = pack(x[m][0][2], x[m][0][3]);
                ds[m][2] = pack(x[m][1][0], x[m][1][1]);
                ds[m][3] = pack(x[m][1][2], x[m][1][3]);
            }
#pragma unroll
            for (int n = 0; n < KSTEPS; n++) {
                u32 key[4];
                load_rows_as_inner(key, ring_k, slot, n, lane);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply(dq[m][2 * n], ds[m], key[0], key[1]);
                    multiply(dq[m][2 * n + 1], ds[m], key[2], key[3]);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < 2; m++) stage(tile_q, warp * 32 + m * 16, dq[m], scale, scale, lane);
        __syncwarp();
        store_rows(grad_q, tile_q, p0, item.end, heads, head0, warp, lane);
        __syncthreads();
    }
    // lanes 4i (and 4i+1..3, which hold copies) carry head i % GROUP
    float* shares = row_delta;
    if ((lane & 3) == 0) shares[warp * 8 + (lane >> 2)] = sink_share;
    __syncthreads();
    if (thread < GROUP) {
        float sum = 0.f;
        for (int i = thread; i < 32; i += GROUP) sum += shares[i];
        grad_sinks[(long long)number * heads + head0 + thread] = sum;
    }
}
