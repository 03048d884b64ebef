#include "longspark/summary_merge.cuh"

namespace longspark {

namespace {

size_t plain_shared_bytes(const Summary& p) {
  return MergeLayout(p.slots, p.dim).size * sizeof(float);
}

template <class T, int kDim>
void launch_tiles(const SummaryMergeBulk& p, Stream stream) {
  const Summary& s = p.summary;
  int tiles = ceil_div(s.heads / s.kv_heads * s.slots, kFlashRows);
  int tiles_per_block = tiles >= 4 ? 4 : tiles >= 2 ? 2 : 1;
  dim3 grid(p.segments, ceil_div(tiles, tiles_per_block), s.layers * s.kv_heads);
  launch(summary_bulk_kernel<T, kDim>, grid, dim3(32 * kFlashWarps),
         tiles_per_block * sizeof(FlashExchange<kDim>), stream, p, tiles_per_block);
}

template <class T>
void launch_plain(const SummaryMergeBulk& p, Stream stream) {
  const Summary& s = p.summary;
  launch(summary_bulk_plain_kernel<T>, dim3(p.segments, s.heads, s.layers), dim3(kMergeThreads),
         plain_shared_bytes(s), stream, p);
}

template <class T>
void launch_16_bit(const SummaryMergeBulk& p, Stream stream) {
  if (!p.tensor_cores) return launch_plain<T>(p, stream);
  switch (p.summary.dim) {
    case 64:
      return launch_tiles<T, 64>(p, stream);
    case 128:
      return launch_tiles<T, 128>(p, stream);
    default:
      return launch_tiles<T, 256>(p, stream);
  }
}

}  // namespace

void summary_merge(const SummaryMerge& p, Stream stream) {
  const Summary& s = p.summary;
  dim3 grid(s.heads, s.layers, s.batch), block(kMergeThreads);
  size_t shared = plain_shared_bytes(s);
  switch (s.dtype) {
    case Dtype::kFloat32:
      return launch(summary_merge_kernel<float>, grid, block, shared, stream, p);
    case Dtype::kBfloat16:
      return launch(summary_merge_kernel<bf16>, grid, block, shared, stream, p);
    case Dtype::kFloat16:
      return launch(summary_merge_kernel<fp16>, grid, block, shared, stream, p);
  }
}

void summary_merge_bulk(const SummaryMergeBulk& p, Stream stream) {
  const Summary& s = p.summary;
  switch (s.dtype) {
    case Dtype::kFloat32:
      launch_plain<float>(p, stream);
      break;
    case Dtype::kBfloat16:
      launch_16_bit<bf16>(p, stream);
      break;
    case Dtype::kFloat16:
      launch_16_bit<fp16>(p, stream);
      break;
  }
  launch(summary_combine_kernel, dim3(s.heads, s.layers, s.batch), dim3(kMergeThreads), 0, stream,
         p);
}

}  // namespace longspark
