#include "longspark/draft_sample.cuh"

namespace longspark {

void draft_sample(const DraftSample& p, Stream stream) {
  int ranges = num_ranges(p.markov.vocab);
  dim3 grid(ceil_div(p.markov.batch, kMarkovRequests), ranges);
  with_markov_types(p.markov, [&](auto weights, auto tensor_cores) {
    launch(draft_scan_kernel<decltype(weights), tensor_cores.kValue>, grid, dim3(kMarkovThreads), 0,
           stream, p);
  });
  launch(draft_finish_kernel, dim3(p.markov.batch), dim3(kDraftFinishThreads), 0, stream, p,
         ranges);
}

}  // namespace longspark
