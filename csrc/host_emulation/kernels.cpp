// The kernels' own source, compiled as C++.
#include "../accept_chain.cu"
#include "../block_attention.cu"
#include "../draft_sample.cu"
#include "../markov_step.cu"
#include "../summary_merge.cu"
#include "../window_gather.cu"
