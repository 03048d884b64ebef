#include "longspark/accept_chain.cuh"

namespace longspark {

void accept_chain(const AcceptChain& asked, Stream stream) {
  AcceptChain p = asked;
  p.markov.slots = p.slots;
  p.markov.prev = p.prev;
  int batch = p.markov.batch, ranges = num_ranges(p.markov.vocab),
      tiles = num_tiles(p.markov.vocab);
  launch(accept_decide_kernel, dim3(batch), dim3(32), 0, stream, p);
  if (p.block > 0) {
    dim3 grid(ceil_div(batch, kMarkovRequests), ranges);
    with_markov_types(p.markov, [&](auto weights, auto tensor_cores) {
      launch(accept_logits_kernel<decltype(weights), tensor_cores.kValue>, grid,
             dim3(kMarkovThreads), 0, stream, p);
    });
  }
  launch(accept_weigh_kernel, dim3(tiles, batch), dim3(kTileThreads), 0, stream, p, ranges);
  launch(accept_draw_kernel, dim3(batch), dim3(kTileThreads), 0, stream, p, tiles);
}

void accept_greedy(const AcceptGreedy& p, Stream stream) {
  launch(accept_greedy_kernel, dim3(ceil_div(p.batch, kGreedyThreads)), dim3(kGreedyThreads), 0,
         stream, p);
}

}  // namespace longspark
