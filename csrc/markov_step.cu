#include "longspark/markov_step.cuh"

namespace longspark {

void markov_step(const MarkovStep& p, Stream stream) {
  dim3 grid(ceil_div(p.markov.batch, kMarkovRequests), ceil_div(p.markov.vocab, kMarkovThreads));
  with_markov_types(p.markov, [&](auto weights, auto tensor_cores) {
    launch(markov_step_kernel<decltype(weights), tensor_cores.kValue>, grid, dim3(kMarkovThreads),
           0, stream, p);
  });
}

}  // namespace longspark
