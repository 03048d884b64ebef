#include "longspark/window_gather.cuh"

namespace longspark {

void window_index(const WindowIndex& p, Stream stream) {
  dim3 grid(ceil_div(p.window, kWindowThreads), p.batch);
  launch(window_index_kernel, grid, dim3(kWindowThreads), 0, stream, p);
}

void window_index_paged(const WindowIndexPaged& p, Stream stream) {
  dim3 grid(ceil_div(p.window, kWindowThreads), p.batch);
  launch(window_index_paged_kernel, grid, dim3(kWindowThreads), 0, stream, p);
}

void window_gather(const WindowGather& p, Stream stream) {
  int units = p.window * p.kv_heads * p.units_per_head;
  dim3 grid(ceil_div(units, kWindowThreads), p.batch, 2 * p.layers), block(kWindowThreads);
  switch (p.unit_bytes) {
    case 16:
      return launch(window_gather_kernel<Vec<uint32_t, 4>>, grid, block, 0, stream, p);
    case 8:
      return launch(window_gather_kernel<Vec<uint32_t, 2>>, grid, block, 0, stream, p);
    case 4:
      return launch(window_gather_kernel<uint32_t>, grid, block, 0, stream, p);
    default:
      return launch(window_gather_kernel<uint16_t>, grid, block, 0, stream, p);
  }
}

}  // namespace longspark
