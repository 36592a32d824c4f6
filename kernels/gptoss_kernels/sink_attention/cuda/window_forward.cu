// O and LSE of sliding-window attention with sinks. Grid: items * heads / GROUP blocks of 128 threads.
#include "march.cuh"

#ifndef STEP
#define STEP 2              // key blocks per softmax step
#endif
#ifndef RESIDENT
#define RESIDENT 2          // thread blocks per multiprocessor to aim at
#endif
constexpr int FIRST = (BLOCKS - 1) % STEP + 1;                 // blocks of the first step; the others have STEP
// The running maximum is replaced only when it falls behind by more than this (in powers of two): most steps then
// rescale nothing, and exp2 of what remains cannot overflow.
constexpr float SLACK = 8.f;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
               const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
               const Item* __restrict__ items, int heads, float scale_log2, int chunk) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 ring = shared_address(memory);                   // K, then V
    const u32 tile = ring + 2 * RING_BYTES, staged = tile + TILE_BYTES;   // Q, and O on its way out
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const int end = min(item.first + chunk, item.end);
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E;
    const WarpRows mine(heads, head0, warp, lane);
    const u32 lane_k = ring + lane_columns(lane), lane_v = ring + RING_BYTES + lane_rows(lane);
    const int row_position = warp * (32 / GROUP) + (lane >> 2) / GROUP, row_head = head0 + (lane >> 2) % GROUP;

    int base = (item.first - item.start) / 16;                 // the tile's first own key block
    int slot0 = (base + NEW * RING - HALO % RING) % RING;
    load_keys(ring, k, v, item, max(0, base - HALO), base + NEW, kv_heads, kv_head, thread);
    mine.load(tile, q, item.first, item.end, heads);
    commit();
    for (int p0 = item.first; p0 < end; p0 += TILE, base += NEW) {
        wait<0>();
        __syncthreads();                                       // keys have landed, and the last tile's are used up
        u32 query[2][KSTEPS][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int s = 0; s < KSTEPS; s++)
                load4(query[m][s], (tile + (warp * 2 + m) * BLOCK_BYTES + lane_rows(lane)) ^ (s << 5));
        __syncwarp();
        if (p0 + TILE < end) {
            load_keys(ring, k, v, item, base + NEW, base + 2 * NEW, kv_heads, kv_head, thread);
            mine.load(tile, q, p0 + TILE, item.end, heads);
        }
        commit();
        float out[2][CHUNKS][4] = {}, highest[2][2], total[2][2] = {};
#pragma unroll
        for (int m = 0; m < 2; m++) highest[m][0] = highest[m][1] = fmaxf(sink, -1e30f);

        // Key blocks first .. first + COUNT - 1. FRESH: nothing has been added up yet.
        auto attend = [&](auto count, auto fresh, int first) {
            constexpr int COUNT = decltype(count)::value;
            float x[2][COUNT][2][4] = {};
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const int b = first + j;
                const u32 address = lane_k + slot_offset(slot0, b);
                if (concerns(b, warp))
#pragma unroll
                    for (int s = 0; s < KSTEPS; s++) {
                        u32 key[4];
                        load4(key, address ^ (s << 5));
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            multiply(x[m][j][0], query[m][s], key[0], key[1]);
                            multiply(x[m][j][1], query[m][s], key[2], key[3]);
                        }
                    }
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int ahead = row_position + (m * 16 + (e >> 1) * 8) / GROUP - 2 * (lane & 3);
                            if (!visible(b, ahead, (b - HALO) * 16 + n * 8 + (e & 1))) x[m][j][n][e] = -infinity();
                        }
            }
            float most[2][2];
            bool behind = false;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    most[m][h] = -infinity();
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
#pragma unroll
                        for (int n = 0; n < 2; n++)
                            most[m][h] = fmaxf(most[m][h], fmaxf(x[m][j][n][2 * h], x[m][j][n][2 * h + 1]));
                    most[m][h] = quad_max(most[m][h]) * scale_log2;
                    behind |= most[m][h] > highest[m][h] + SLACK;
                }
            if (decltype(fresh)::value) {
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) highest[m][h] = fmaxf(highest[m][h], most[m][h]);
            } else if (__any_sync(0xffffffffu, behind)) {
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float now = fmaxf(highest[m][h], most[m][h]), decay = exp2_approx(highest[m][h] - now);
                        highest[m][h] = now;
                        total[m][h] *= decay;
#pragma unroll
                        for (int n = 0; n < CHUNKS; n++) {
                            out[m][n][2 * h] *= decay;
                            out[m][n][2 * h + 1] *= decay;
                        }
                    }
            }
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const int b = first + j;
                if (!concerns(b, warp)) continue;
                u32 p[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            x[m][j][n][e] = exp2_approx(fmaf(x[m][j][n][e], scale_log2, -highest[m][e >> 1]));
                            total[m][e >> 1] += x[m][j][n][e];
                        }
                    p[m][0] = pack(x[m][j][0][0], x[m][j][0][1]);
                    p[m][1] = pack(x[m][j][0][2], x[m][j][0][3]);
                    p[m][2] = pack(x[m][j][1][0], x[m][j][1][1]);
                    p[m][3] = pack(x[m][j][1][2], x[m][j][1][3]);
                }
                const u32 address = lane_v + slot_offset(slot0, b);
#pragma unroll
                for (int n = 0; n < KSTEPS; n++) {
                    u32 value[4];
                    load4_transposed(value, address ^ (n << 5));
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        multiply(out[m][2 * n], p[m], value[0], value[1]);
                        multiply(out[m][2 * n + 1], p[m], value[2], value[3]);
                    }
                }
            }
        };
        if (base >= HALO) {
            attend(Constant<FIRST>(), Constant<1>(), 0);
#pragma unroll
            for (int first = FIRST; first < BLOCKS; first += STEP) attend(Constant<STEP>(), Constant<0>(), first);
        } else {                                               // the window reaches before the sequence's start
#pragma unroll 1
            for (int b = HALO - base; b < BLOCKS; b++) attend(Constant<1>(), Constant<0>(), b);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float inverse[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float sum = quad_sum(total[m][h]) + exp2_approx(sink - highest[m][h]);
                inverse[h] = 1.f / sum;
                const int p = p0 + row_position + (m * 16 + h * 8) / GROUP;
                if ((lane & 3) == 0 && p < item.end)
                    lse[(long long)p * heads + row_head] = (highest[m][h] + log2_approx(sum)) * LN2;
            }
            stage(staged + (warp * 2 + m) * BLOCK_BYTES, out[m], inverse[0], inverse[1], lane);
        }
        __syncwarp();
        mine.store(o, staged, p0, item.end, heads);
        slot0 = slot0 + NEW < RING ? slot0 + NEW : slot0 + NEW - RING;
    }
}
