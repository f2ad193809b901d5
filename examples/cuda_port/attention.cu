// SPDX-License-Identifier: Apache-2.0

// A thread owns a row: of queries in the forward and in dQ, of keys in dK and
// dV. A block of threads walks over the other side's rows tile by tile, through
// shared memory. Nothing is added by atomics, so that results do not move from
// run to run.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "attention.h"

namespace {

constexpr int kRows = 64;  // threads of a block
constexpr int kTile = 32;  // rows in shared memory: 2 x 16 KiB at D 128

struct Shape {
  int heads, kv_heads, nq, nk;
  float scale;
  bool causal;
  Bug bug;

  __device__ int KvHead(int head) const {
    return bug == kHeadMapModulo ? head % kv_heads : head / (heads / kv_heads);
  }
  // Keys that query i sees are those below.
  __device__ int KeyEnd(int i) const {
    int end = nk;
    if (causal) end = min(nk, i + 1 + (bug == kCausalTopLeft ? 0 : nk - nq));
    if (bug == kLastKeyTileSkipped) end = min(end, nk / kTile * kTile);
    return end;
  }
};

__device__ float Rounded(float x) {
  return __bfloat162float(__float2bfloat16(x));
}

// A row into a thread's own registers; rows past the end are zeros.
template <int kDim>
__device__ void LoadRow(const __nv_bfloat16* from, bool inside, float* row) {
  for (int d = 0; d < kDim; ++d) {
    row[d] = inside ? __bfloat162float(from[d]) : 0.0f;
  }
}

template <int kDim>
__device__ void StoreRow(const float* row, float factor, __nv_bfloat16* to) {
  for (int d = 0; d < kDim; ++d) to[d] = __float2bfloat16(row[d] * factor);
}

// Rows [first, first + kTile) of n, by all threads of the block together.
template <int kDim>
__device__ void LoadTile(const __nv_bfloat16* from, int first, int n,
                         float (*tile)[kDim]) {
  for (int i = threadIdx.x; i < kTile * kDim; i += kRows) {
    const int row = i / kDim, d = i % kDim;
    tile[row][d] = first + row < n
                       ? __bfloat162float(from[(first + row) * kDim + d])
                       : 0.0f;
  }
}

template <int kDim>
__device__ float Dot(const float* a, const float* b) {
  float sum = 0.0f;
  for (int d = 0; d < kDim; ++d) sum += a[d] * b[d];
  return sum;
}

template <int kDim>
__device__ void AddScaled(float factor, const float* from, float* to) {
  for (int d = 0; d < kDim; ++d) to[d] += factor * from[d];
}

template <int kDim>
__global__ void Forward(Shape s, const __nv_bfloat16* q, const __nv_bfloat16* k,
                        const __nv_bfloat16* v, __nv_bfloat16* out,
                        float* lse) {
  __shared__ float k_tile[kTile][kDim], v_tile[kTile][kDim];
  const int head = blockIdx.y, batch = blockIdx.z;
  const int i = blockIdx.x * kRows + threadIdx.x;
  const bool inside = i < s.nq;
  const long row = (static_cast<long>(batch) * s.heads + head) * s.nq + i;
  const long keys =
      (static_cast<long>(batch) * s.kv_heads + s.KvHead(head)) * s.nk * kDim;
  float q_row[kDim], sum[kDim] = {};
  LoadRow<kDim>(q + row * kDim, inside, q_row);
  float max = -INFINITY, total = 0.0f;
  const int end = inside ? s.KeyEnd(i) : 0;
  for (int first = 0; first < s.nk; first += kTile) {
    __syncthreads();
    LoadTile<kDim>(k + keys, first, s.nk, k_tile);
    LoadTile<kDim>(v + keys, first, s.nk, v_tile);
    __syncthreads();
    const int count = min(kTile, end - first);
    float score[kTile], tile_max = max;
    for (int j = 0; j < count; ++j) {
      score[j] = s.scale * Dot<kDim>(q_row, k_tile[j]);
      tile_max = fmaxf(tile_max, score[j]);
    }
    if (count <= 0) continue;
    // What was summed before, by the new maximum.
    const float factor = expf(max - tile_max);
    for (int d = 0; d < kDim; ++d) sum[d] *= factor;
    total *= factor;
    max = tile_max;
    for (int j = 0; j < count; ++j) {
      const float p = expf(score[j] - max);
      total += p;
      AddScaled<kDim>(Rounded(p), v_tile[j], sum);
    }
  }
  if (!inside) return;
  StoreRow<kDim>(sum, total > 0.0f ? 1.0f / total : 0.0f, out + row * kDim);
  lse[row] = max + logf(total);
  if (s.bug == kLseBase2) lse[row] *= 1.44269504f;
}

// dQ, and delta = sum of O * dO of each row, which the other gradients need.
template <int kDim>
__global__ void QueryGradient(Shape s, const __nv_bfloat16* q,
                              const __nv_bfloat16* k, const __nv_bfloat16* v,
                              const __nv_bfloat16* dout,
                              const __nv_bfloat16* out, const float* lse,
                              float* delta, __nv_bfloat16* dq) {
  __shared__ float k_tile[kTile][kDim], v_tile[kTile][kDim];
  const int head = blockIdx.y, batch = blockIdx.z;
  const int i = blockIdx.x * kRows + threadIdx.x;
  const bool inside = i < s.nq;
  const long row = (static_cast<long>(batch) * s.heads + head) * s.nq + i;
  const long keys =
      (static_cast<long>(batch) * s.kv_heads + s.KvHead(head)) * s.nk * kDim;
  float q_row[kDim], dout_row[kDim], sum[kDim] = {};
  LoadRow<kDim>(out + row * kDim, inside, q_row);
  LoadRow<kDim>(dout + row * kDim, inside, dout_row);
  float row_delta = Dot<kDim>(q_row, dout_row);
  if (s.bug == kDeltaMissing) row_delta = 0.0f;
  if (inside) delta[row] = row_delta;
  LoadRow<kDim>(q + row * kDim, inside, q_row);
  const float row_lse = inside ? lse[row] : 0.0f;
  const int end = inside ? s.KeyEnd(i) : 0;
  for (int first = 0; first < s.nk; first += kTile) {
    __syncthreads();
    LoadTile<kDim>(k + keys, first, s.nk, k_tile);
    LoadTile<kDim>(v + keys, first, s.nk, v_tile);
    __syncthreads();
    if (s.bug == kDqOverwritten && first < end) {
      for (int d = 0; d < kDim; ++d) sum[d] = 0.0f;
    }
    for (int j = 0; j < min(kTile, end - first); ++j) {
      const float p = expf(s.scale * Dot<kDim>(q_row, k_tile[j]) - row_lse);
      const float ds = p * (Dot<kDim>(dout_row, v_tile[j]) - row_delta);
      AddScaled<kDim>(Rounded(ds), k_tile[j], sum);
    }
  }
  const float factor = s.bug == kScaleMissing ? 1.0f : s.scale;
  if (inside) StoreRow<kDim>(sum, factor, dq + row * kDim);
}

template <int kDim>
__global__ void KeyGradients(Shape s, const __nv_bfloat16* q,
                             const __nv_bfloat16* k, const __nv_bfloat16* v,
                             const __nv_bfloat16* dout, const float* lse,
                             const float* delta, __nv_bfloat16* dk,
                             __nv_bfloat16* dv) {
  __shared__ float q_tile[kTile][kDim], dout_tile[kTile][kDim];
  const int kv_head = blockIdx.y, batch = blockIdx.z;
  const int j = blockIdx.x * kRows + threadIdx.x;
  const bool inside = j < s.nk;
  const long row = (static_cast<long>(batch) * s.kv_heads + kv_head) * s.nk + j;
  float k_row[kDim], v_row[kDim], dk_row[kDim] = {}, dv_row[kDim] = {};
  LoadRow<kDim>(k + row * kDim, inside, k_row);
  LoadRow<kDim>(v + row * kDim, inside, v_row);
  for (int head = 0; head < s.heads; ++head) {
    if (s.KvHead(head) != kv_head) continue;
    if (s.bug == kGroupNotSummed) {
      for (int d = 0; d < kDim; ++d) dk_row[d] = dv_row[d] = 0.0f;
    }
    const long rows = (static_cast<long>(batch) * s.heads + head) * s.nq;
    for (int first = 0; first < s.nq; first += kTile) {
      __syncthreads();
      LoadTile<kDim>(q + rows * kDim, first, s.nq, q_tile);
      LoadTile<kDim>(dout + rows * kDim, first, s.nq, dout_tile);
      __syncthreads();
      for (int r = 0; r < min(kTile, s.nq - first); ++r) {
        const int i = first + r;
        if (!inside || j >= s.KeyEnd(i)) continue;
        const float p =
            expf(s.scale * Dot<kDim>(q_tile[r], k_row) - lse[rows + i]);
        const float ds = p * (Dot<kDim>(dout_tile[r], v_row) - delta[rows + i]);
        AddScaled<kDim>(Rounded(p), dout_tile[r], dv_row);
        AddScaled<kDim>(Rounded(ds), q_tile[r], dk_row);
      }
    }
  }
  if (!inside) return;
  const float factor = s.bug == kScaleMissing ? 1.0f : s.scale;
  StoreRow<kDim>(dk_row, factor, dk + row * kDim);
  StoreRow<kDim>(dv_row, 1.0f, dv + row * kDim);
}

// Memory of the GPU, with what the host's array holds.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : size_(host.size()) {
    cudaMalloc(&data_, size_ * sizeof(T));
    cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  explicit OnDevice(size_t size) : OnDevice(std::vector<T>(size)) {}
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // A bf16 is its bits on the host.
  template <class U>
  U* As() const {
    return static_cast<U*>(data_);
  }
  void CopyTo(std::vector<T>* host) const {
    host->resize(size_);
    cudaMemcpy(host->data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost);
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

template <int kDim>
void Launch(const Shape& s, Attention* call) {
  using Bf16 = __nv_bfloat16;
  const OnDevice<uint16_t> q(call->q), k(call->k), v(call->v), dout(call->dout),
      out(call->q.size()), dq(call->q.size()), dk(call->k.size()),
      dv(call->v.size());
  const OnDevice<float> lse(call->q.size() / kDim),
      delta(call->q.size() / kDim);
  const unsigned heads = call->heads, batch = call->batch;
  const dim3 queries((call->nq + kRows - 1) / kRows, heads, batch);
  const dim3 keys((call->nk + kRows - 1) / kRows, call->kv_heads, batch);
  Forward<kDim><<<queries, kRows>>>(s, q.As<Bf16>(), k.As<Bf16>(), v.As<Bf16>(),
                                    out.As<Bf16>(), lse.As<float>());
  QueryGradient<kDim><<<queries, kRows>>>(
      s, q.As<Bf16>(), k.As<Bf16>(), v.As<Bf16>(), dout.As<Bf16>(),
      out.As<Bf16>(), lse.As<float>(), delta.As<float>(), dq.As<Bf16>());
  KeyGradients<kDim><<<keys, kRows>>>(
      s, q.As<Bf16>(), k.As<Bf16>(), v.As<Bf16>(), dout.As<Bf16>(),
      lse.As<float>(), delta.As<float>(), dk.As<Bf16>(), dv.As<Bf16>());
  out.CopyTo(&call->out);
  lse.CopyTo(&call->lse);
  dq.CopyTo(&call->dq);
  dk.CopyTo(&call->dk);
  dv.CopyTo(&call->dv);
}

}  // namespace

std::string Run(Bug bug, Attention* call) {
  const Shape s = {call->heads,
                   call->kv_heads,
                   call->nq,
                   call->nk,
                   1.0f / std::sqrt(static_cast<float>(call->dim)),
                   call->causal,
                   bug};
  if (call->dim == 64) {
    Launch<64>(s, call);
  } else if (call->dim == 128) {
    Launch<128>(s, call);
  } else {
    return "head dim is " + std::to_string(call->dim) +
           ", it must be 64 or 128";
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
