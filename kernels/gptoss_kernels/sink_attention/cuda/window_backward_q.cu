// dQ, per row (LSE * log2(e), delta = rowsum(dO * O)), and each item's share of dsinks.
// Grid: items * heads / GROUP blocks of 128 threads.
#include "march.cuh"

#ifndef RESIDENT
#define RESIDENT 2
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_backward_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                  const float* __restrict__ sinks, const bf16* __restrict__ o, const float* __restrict__ lse,
                  const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q, float2* __restrict__ row_stats,
                  float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads, float scale, int chunk) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 ring = shared_address(memory);                   // K, then V
    const u32 tile = ring + 2 * RING_BYTES;                    // Q, dO, O, and dQ on its way out
    const u32 tile_grad = tile + TILE_BYTES, tile_out = tile + 2 * TILE_BYTES, staged = tile + 3 * TILE_BYTES;
    float* row_delta = (float*)(memory + 2 * RING_BYTES + 4 * TILE_BYTES);   // [ROWS]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const int end = min(item.first + chunk, item.end);
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E, scale_log2 = scale * LOG2E;
    const WarpRows mine(heads, head0, warp, lane);
    const u32 lane_k = ring + lane_columns(lane), lane_k_inner = ring + lane_rows(lane);
    const int row_position = warp * (32 / GROUP) + (lane >> 2) / GROUP, row_head = head0 + (lane >> 2) % GROUP;
    float sink_share = 0.f;

    auto load_rows = [&](int p0) {
        mine.load(tile, q, p0, item.end, heads);
        mine.load(tile_grad, grad_o, p0, item.end, heads);
        mine.load(tile_out, o, p0, item.end, heads);
    };
    float next_lse[2][2];
    auto load_lse = [&](int p0) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int p = p0 + row_position + (m * 16 + h * 8) / GROUP;
                next_lse[m][h] = p < item.end ? lse[(long long)p * heads + row_head] * LOG2E : infinity();
            }
    };
    int base = (item.first - item.start) / 16;
    int slot0 = (base + NEW * RING - HALO % RING) % RING;
    load_keys(ring, k, v, item, max(0, base - HALO), base + NEW, kv_heads, kv_head, thread);
    load_rows(item.first);
    commit();
    load_lse(item.first);
    for (int p0 = item.first; p0 < end; p0 += TILE, base += NEW) {
        wait<0>();
        __syncthreads();                                       // keys have landed, and the last tile's are used up
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const uint4 g = shared_load16(mine.address(tile_grad, i)), out = shared_load16(mine.address(tile_out, i));
            const u32 a[4] = {out.x, out.y, out.z, out.w}, c[4] = {g.x, g.y, g.z, g.w};
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sum = fmaf(__int_as_float(a[e] << 16), __int_as_float(c[e] << 16), sum);
                sum = fmaf(__int_as_float(a[e] & 0xffff0000u), __int_as_float(c[e] & 0xffff0000u), sum);
            }
#pragma unroll
            for (int s = 1; s < CHUNKS; s <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, s);
            if (lane % CHUNKS == 0) row_delta[warp * 32 + i * SPAN + lane / CHUNKS] = sum;
        }
        __syncwarp();
        u32 query[2][KSTEPS][4], grad[2][KSTEPS][4];
        float d[2][2], row_lse[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 address = tile + (warp * 2 + m) * BLOCK_BYTES + lane_rows(lane);
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                load4(query[m][s], address ^ (s << 5));
                load4(grad[m][s], (address ^ (s << 5)) + TILE_BYTES);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int p = p0 + row_position + (m * 16 + h * 8) / GROUP;
                row_lse[m][h] = next_lse[m][h];
                d[m][h] = row_delta[warp * 32 + m * 16 + h * 8 + (lane >> 2)];
                if (p < item.end) {
                    sink_share -= exp2_approx(sink - row_lse[m][h]) * d[m][h];
                    if ((lane & 3) == 0) row_stats[(long long)p * heads + row_head] = make_float2(row_lse[m][h], d[m][h]);
                }
            }
        }
        __syncwarp();
        if (p0 + TILE < end) {
            load_keys(ring, k, v, item, base + NEW, base + 2 * NEW, kv_heads, kv_head, thread);
            load_rows(p0 + TILE);
            load_lse(p0 + TILE);
        }
        commit();
        float dq[2][CHUNKS][4] = {};
        auto differentiate = [&](int b) {
            if (!concerns(b, warp)) return;
            const u32 offset = slot_offset(slot0, b), address = lane_k + offset;
            float x[2][2][4] = {}, dp[2][2][4] = {};
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                u32 key[4], value[4];
                load4(key, address ^ (s << 5));
                load4(value, (address ^ (s << 5)) + RING_BYTES);
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
                        const int ahead = row_position + (m * 16 + (e >> 1) * 8) / GROUP - 2 * (lane & 3);
                        if (!visible(b, ahead, (b - HALO) * 16 + n * 8 + (e & 1))) p = 0.f;
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
                load4_transposed(key, (lane_k_inner + offset) ^ (n << 5));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply(dq[m][2 * n], ds[m], key[0], key[1]);
                    multiply(dq[m][2 * n + 1], ds[m], key[2], key[3]);
                }
            }
        };
        if (base >= HALO) {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) differentiate(b);
        } else {                                               // the window reaches before the sequence's start
#pragma unroll 1
            for (int b = HALO - base; b < BLOCKS; b++) differentiate(b);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) stage(staged + (warp * 2 + m) * BLOCK_BYTES, dq[m], scale, scale, lane);
        __syncwarp();
        mine.store(grad_q, staged, p0, item.end, heads);
        slot0 = slot0 + NEW < RING ? slot0 + NEW : slot0 + NEW - RING;
    }
    // lanes 4i (and 4i+1..3, which hold copies) carry head i % GROUP
    float* shares = row_delta;
    __syncthreads();
    if ((lane & 3) == 0) shares[warp * 8 + (lane >> 2)] = sink_share;
    __syncthreads();
    if (thread < GROUP) {
        float sum = 0.f;
        for (int i = thread; i < 32; i += GROUP) sum += shares[i];
        grad_sinks[(long long)number * heads + head0 + thread] = sum;
    }
}
