// Sums of weighted rows over the edges of a graph, and the gradient of the weights.
//
//   forward, merge:  out[r, h, :] = scale[r] sum over r's edges of w(e, h) x[other(e), h, :], then
//   / edges (MEAN), then + bias,
//                    with `add` then + what out[r, h, :] was
//   forward_short:   the same for graphs of short rows, of which a warp sums several side by side
//   edge_dot:        out[e, h] = <left[r, h, :], right[other(e), h, :]> for every edge e of r
//
// WEIGHT says whether w is 1, one number per edge or one per edge and head; BY_PLACE whether an
// edge's numbers stand at its place (`Rows.place`) or at its position in this graph; IDENTITY makes
// other(e) the position itself. With INT8 the rows of x are whole numbers, STRIDE bytes apart, and
// x_scale has what each is to be multiplied with: that joins the edge's weight, loaded
// edge-parallel with it. A warp's slots take edges side by side, UNROLL of them in flight. Nothing
// else is scaled before the sum is whole, so a row's sum does not depend on whether the row is
// split but for the order of its terms.
#include "trimmed.cuh"

#define LEAST_BLOCKS (INT8 ? 7 : 0)

#define NO_WEIGHT 0
#define EDGE_WEIGHT 1
#define HEAD_WEIGHT 2

// One turn of a warp: as many edges as its slots have in flight, but at least a load's 32. Narrow
// rows have up to 32 slots.
#define PARTS ((SLOTS * UNROLL + 31) / 32)
#define TURN (32 * PARTS)

struct Graph {
    const int* other;
    const OFF_T* place;
};

// Whether an edge has a number that its loading lane hands to the lanes that sum.
#define HANDED (WEIGHT == EDGE_WEIGHT || INT8)

// What the lanes know of a turn's edges: edge 32 p + lane at [p]. They are loaded edge-parallel and
// passed round by shuffles.
struct Turn {
    OFF_T base;
    int edges;
    int other[PARTS];
    OFF_T place[PARTS];
    float weight[PARTS];
};

// The edge's number: its weight, if there is one and it is the edge's alone, times the scale of its
// row.
template <bool Weights>
__device__ __forceinline__ float number_of(const float* weight, u64 at, const float* scale,
                                           u64 row) {
    const float w = Weights ? weight[at] : 1.f;
    return INT8 ? w * __ldg(scale + row) : w;
}

// The next edges of those that end at `end`, `rest` in number: counting down cannot run over the
// end of OFF_T.
template <bool Places, bool Weights>
__device__ __forceinline__ void load_turn(const Lanes& at, const Graph& graph, const float* weight,
                                          const float* scale, OFF_T end, OFF_T rest, Turn& t) {
    t.base = end - rest;
    t.edges = rest < TURN ? (int)rest : TURN;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const bool on = 32 * p + at.lane < t.edges;
        const OFF_T position = t.base + 32 * p + at.lane;
        t.other[p] = !IDENTITY && on ? graph.other[position] : 0;
        t.place[p] = Places && BY_PLACE && on ? graph.place[position] : 0;
        t.weight[p] = (Weights || INT8)
            && on ? number_of<Weights>(weight, (u64)(BY_PLACE ? t.place[p] : position), scale,
                                                                   (u64)(IDENTITY ? position
                                                                         : t.other[p]))
                                              : 0.f;
    }
}

// Edge `e` of the turn is this slot's in round u. All lanes must ask: the answers come from the
// lanes that loaded them.
__device__ __forceinline__ u64 gathered_row(const Turn& t, int u, int e) {
    if (IDENTITY) return (u64)(t.base + (INT8 && e >= t.edges ? 0 : e));
    return (u32)__shfl_sync(FULL_WARP, t.other[u * SLOTS / 32], e & 31);
}

__device__ __forceinline__ u64 edge_row(const Turn& t, int u, int e) {
    return BY_PLACE ? (u64)__shfl_sync(FULL_WARP, t.place[u * SLOTS / 32], e & 31)
        : (u64)(t.base + e);
}

__device__ __forceinline__ void add_weighted(const Loaded<ROW_T>& row, const float (&w)[KH],
                                             Row& sum) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        float v[VEC];
        row.pack(k, v);
#pragma unroll
        for (int c = 0; c < VEC; ++c)
            sum[k][c] = WEIGHT == NO_WEIGHT
                && !INT8 ? sum[k][c] + v[c] : fmaf(w[k / KV], v[c], sum[k][c]);
    }
}

// Adds UNROLL edges per slot, the first at `first`. What lanes ask each other comes before all
// loads: a compiler orders instructions between such questions only. Slots beyond the last edge add
// 0 times 0, or of whole numbers 0 times some row: an infinite number of another edge must not
// reach them. Whole: there are none.
template <bool Whole>
__device__ __forceinline__ void fold(const Lanes& at, const Turn& t, int first,
                                     const Gathered<ROW_T>& x, const float* weight, Row& sum) {
    Loaded<ROW_T> v[UNROLL];
    u64 row[UNROLL], line[UNROLL];
    float own[UNROLL], w[UNROLL][KH];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        row[u] = gathered_row(t, u, e);
        own[u] = HANDED ? __shfl_sync(FULL_WARP, t.weight[u * SLOTS / 32], e & 31) : 1.f;
        line[u] = WEIGHT == HEAD_WEIGHT ? edge_row(t, u, e) : 0;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const bool on = Whole || first + u * SLOTS + at.slot < t.edges;
        v[u].load(at, x.rows, row[u], INT8 || on);
        // Lanes of one head read one address and the heads stand side by side, so this load needs
        // no detour over lanes.
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            w[u][kh] = WEIGHT != HEAD_WEIGHT ? (INT8 || on ? own[u] : 0.f)
                                             : on && at.has(kh)
                                                 ? own[u] * weight[line[u] * H + at.head(kh)] : 0.f;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) add_weighted(v[u], w[u], sum);
}

// For the lanes that hold the sum. A row without edges is zero whatever its scale, which as the
// reciprocal of a count may be infinite.
__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T edges, Row& sum,
                                       const float* scale, const float* bias, int add, OUT_T* out) {
    const float factor = scale && edges ? scale[row] : 1.f,
        count = MEAN && edges ? (float)edges : 1.f;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c)
            sum[k][c] = MEAN ? sum[k][c] * factor / count : sum[k][c] * factor;
    if (bias) {
        Row b;
        load_result(at, bias, 0, b);
        add_row(sum, b);
    }
    if (add) {
        Row before;
        load_result(at, out, (u64)row, before);
        add_row(sum, before);
    }
    store_result(at, out, row, sum);
}

// A warp's item: a whole row, or a chunk of a long one.
__device__ __forceinline__ void sum_item(const Lanes& at, const Item& it, const Graph& graph,
                                         const Gathered<ROW_T>& x, const float* weight, Row& sum) {
    clear_row(sum);
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        Turn t;
        load_turn<WEIGHT != NO_WEIGHT,
            WEIGHT == EDGE_WEIGHT>(at, graph, weight, x.scale, it.end, rest, t);
        each_step<true>(t.edges, [&](auto kind, int first) {
            fold<decltype(kind)::whole>(at, t, first, x, weight, sum);
        });
    }
    sum_slots(sum);
}

extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots, GATHERED(x),
        const float* __restrict__ weight, const float* __restrict__ scale,
        const float* __restrict__ bias, int add, OUT_T* __restrict__ out,
        float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Graph graph = {other, place};
    const Gathered<ROW_T> rows_of_x = ROWS_OF(x);
    Row sum;
    sum_item(at, it, graph, rows_of_x, weight, sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, sum, scale, bias, add, out);
    else store_row(at, part, it.chunk, sum);
}

// Each slot's own row, all of them to the length of the longest: the lanes go together, since they
// ask each other for ids.
__device__ __forceinline__ void sum_rows(const Lanes& at, OFF_T begin, int edges,
                                         const Graph& graph, const Gathered<ROW_T>& x,
                                         const float* weight, Row& sum) {
    clear_row(sum);
    int longest = edges;
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1)
        longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, w));
    for (int base = 0; base < longest; base += ROW_LANES) {
        const int own = base + at.lane % ROW_LANES;
        const OFF_T position = begin + own;
        const bool mine = own < edges;
        const int other = !IDENTITY && mine ? graph.other[position] : 0;
        const OFF_T place = WEIGHT != NO_WEIGHT && BY_PLACE
            && mine ? graph.place[position] : position;
        const float one = HANDED
            && mine ? number_of<WEIGHT == EDGE_WEIGHT>(weight, (u64)place, x.scale,
                                                                            (u64)(IDENTITY
                                                                                  ? position
                                                                                  : other))
                                         : 0.f;
        for (int first = 0; first < ROW_LANES && base + first < longest; first += UNROLL) {
            Loaded<ROW_T> v[UNROLL];
            float w[UNROLL][KH];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int from = (at.lane & ~(ROW_LANES - 1)) + ((first + u) & (ROW_LANES - 1));
                const bool on = first + u < ROW_LANES && base + first + u < edges;
                const u64 row = IDENTITY ? (u64)(INT8 && !on ? 0 : begin + base + first + u)
                                         : (u64)__shfl_sync(FULL_WARP, other, from);
                v[u].load(at, x.rows, row, on);
                const float f = HANDED ? __shfl_sync(FULL_WARP, one, from) : 1.f;
                const u64 line = WEIGHT == HEAD_WEIGHT ? (u64)__shfl_sync(FULL_WARP, place, from)
                    : 0;
#pragma unroll
                for (int kh = 0; kh < KH; ++kh)
                    w[u][kh] = !on ? 0.f : WEIGHT != HEAD_WEIGHT ? f : at.head(kh) < H
                        ? f * weight[line * H + at.head(kh)] : 0.f;
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) add_weighted(v[u], w[u], sum);
        }
    }
}

extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
forward_short(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
              const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
              const int2* __restrict__ chunks, int chunk_edges, int chunk_slots, GATHERED(x),
              const float* __restrict__ weight, const float* __restrict__ scale,
              const float* __restrict__ bias, int add, OUT_T* __restrict__ out,
              float* __restrict__ part) {
    const Lanes at;
    const Graph graph = {other, place};
    const Gathered<ROW_T> rows_of_x = ROWS_OF(x);
    const long long w = warp_id();
    Row sum;
    if (w < chunk_slots) {
        const Split split = {counters, chunks, chunk_edges, chunk_slots};
        Item it;
        if (!item_at(w, rows, indptr, split, it)) return;
        sum_item(at, it, graph, rows_of_x, weight, sum);
        if (at.slot == 0) store_row(at, part, it.chunk, sum);
        return;
    }
    const long long row = (w - chunk_slots) * SLOTS + at.slot;
    OFF_T begin = 0, edges = 0;
    if (row < rows) {
        begin = indptr[row];
        edges = indptr[row + 1] - begin;
    }
    const bool whole = row < rows && edges <= chunk_edges;  // longer ones lie in chunks
    sum_rows(at, begin, whole ? (int)edges : 0, graph, rows_of_x, weight, sum);
    if (whole) finish(at, (int)row, edges, sum, scale, bias, add, out);
}

extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const OFF_T* __restrict__ indptr, const float* __restrict__ part,
      const float* __restrict__ scale, const float* __restrict__ bias, int add,
      OUT_T* __restrict__ out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0)
        finish(at, row.x, indptr[row.x + 1] - indptr[row.x], sum, scale, bias, add, out);
}

// The row that stays, and its inner product with a gathered one over head kh: floats, or with
// LEFT_INT8 such rows as the gathered ones. The sum of whole numbers is then exact.
#if INT8 && LEFT_INT8
#define LEFT(left) GATHERED(left)
#define LEFT_OF(left) left, left##_scale
struct Left {
    Loaded<q8> row;
    float scale;

    __device__ __forceinline__ Left(const Lanes& at, const Item& it, const q8* left,
                                    const float* scales) {
        row.load(at, left, (u64)it.row, true);
        scale = scales[it.row];
#pragma unroll
        for (int k = 0; k < PACKS; ++k)  // a lane that owns nothing loaded what is another's
            if (!at.owns(k / KV, k % KV)) row.word[k].word = typename Word<VEC>::type();
    }
    __device__ __forceinline__ float dot(const Loaded<q8>& v, int kh) const {
        int s = 0;
#pragma unroll
        for (int i = kh * KV; i < (kh + 1) * KV; ++i) s = dot_bytes<VEC>(row.word[i], v.word[i], s);
#pragma unroll
        for (int step = LH / 2; step > 0; step /= 2) s += __shfl_xor_sync(FULL_WARP, s, step);
        return (float)s * scale;
    }
};
#else
#define LEFT(left) const OUT_T* __restrict__ left
#define LEFT_OF(left) left
struct Left {
    Row row;

    __device__ __forceinline__ Left(const Lanes& at, const Item& it, const OUT_T* left) {
        load_result(at, left, (u64)it.row, row, it.end > it.begin);
    }
    __device__ __forceinline__ float dot(const Loaded<ROW_T>& v, int kh) const {
        float s = 0.f;
#pragma unroll
        for (int i = kh * KV; i < (kh + 1) * KV; ++i) {
            float some[VEC];
            v.pack(i, some);
#pragma unroll
            for (int c = 0; c < VEC; ++c) s = fmaf(row[i][c], some[c], s);
        }
        return lane_sum<LH>(s);
    }
};
#endif

// The row's own side stays in registers. Chunks of a split row write edges of their own, so nothing
// is merged.
extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
edge_dot(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots, LEFT(left),
         GATHERED(right), float* __restrict__ out) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Graph graph = {other, place};
    const Gathered<ROW_T> rows_of_right = ROWS_OF(right);
    const Left own(at, it, LEFT_OF(left));
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        Turn t;
        load_turn<true, false>(at, graph, nullptr, rows_of_right.scale, it.end, rest, t);
        for (int first = 0; first < t.edges; first += SLOTS * UNROLL) {
            Loaded<ROW_T> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int e = first + u * SLOTS + at.slot;
                v[u].load(at, right, gathered_row(t, u, e), e < t.edges);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int e = first + u * SLOTS + at.slot;
                const u64 row = edge_row(t, u, e);
                const float f = INT8 ? __shfl_sync(FULL_WARP, t.weight[u * SLOTS / 32], e & 31)
                    : 1.f;
#pragma unroll
                for (int kh = 0; kh < KH; ++kh) {
                    const float s = own.dot(v[u], kh);
                    if (e < t.edges && at.lh == 0 && at.head(kh) < H)
                        out[row * H + at.head(kh)] = INT8 ? s * f : s;
                }
            }
        }
    }
}
