// The kernels of one instruction set; included by isa_*.cpp, each of which sets LONGSPARK_ISA and
// the compiler's target first.
#pragma once

#include "block_attention.h"
#include "kernels.h"
#include "paged_attention.h"
#include "summary_merge.h"
#include "vocabulary.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    LONGSPARK_ISA_NAME,
    kChunkRows,
    paged_attention_scratch,
    paged_attention,
    paged_attention_merge,
    block_attention_scratch,
    block_attention,
    summary_merge_scratch,
    summary_merge,
    markov_packed_words,
    markov_pack,
    markov_scratch,
    markov_step,
    draft_sample,
    residual_logits,
    residual_weights,
};

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
