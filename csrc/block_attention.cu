#include "longspark/block_attention.cuh"

namespace longspark {

namespace {

template <class T, int kDim>
void launch_tiles(const BlockAttention& p, Stream stream) {
  int group = p.heads / p.kv_heads;
  int tiles = ceil_div(group, p.block <= 8 ? 2 : 1);
  // Two tiles a block leave four warps for each tile's keys.
  int tiles_per_block = tiles > 1 ? 2 : 1;
  dim3 grid(ceil_div(tiles, tiles_per_block), p.kv_heads, p.batch);
  launch(block_attention_kernel<T, kDim>, grid, dim3(32 * kFlashWarps),
         tiles_per_block * sizeof(FlashExchange<kDim>), stream, p, tiles_per_block);
}

template <class T>
void launch_plain(const BlockAttention& p, Stream stream) {
  size_t shared = PlainBlockLayout(p.block, p.dim).size * sizeof(float);
  launch(block_attention_plain_kernel<T>, dim3(p.heads, p.batch), dim3(kPlainThreads), shared,
         stream, p);
}

template <class T>
void launch_16_bit(const BlockAttention& p, Stream stream) {
  if (!p.tensor_cores) return launch_plain<T>(p, stream);
  switch (p.dim) {
    case 64:
      return launch_tiles<T, 64>(p, stream);
    case 128:
      return launch_tiles<T, 128>(p, stream);
    default:
      return launch_tiles<T, 256>(p, stream);
  }
}

}  // namespace

void block_attention(const BlockAttention& p, Stream stream) {
  switch (p.dtype) {
    case Dtype::kFloat32:
      return launch_plain<float>(p, stream);
    case Dtype::kBfloat16:
      return launch_16_bit<bf16>(p, stream);
    case Dtype::kFloat16:
      return launch_16_bit<fp16>(p, stream);
  }
}

}  // namespace longspark
