// Merges of a SentencePiece BPE vocabulary, which lists scores and no merges: two neighbouring
// symbols may merge when their joined text is a token, the highest score first.
#pragma once

#include <vector>

#include "tokenizer/bpe.h"

namespace pianola {

// Adds every such pair to `bpe`. Control, unknown and byte tokens are never made of text. Throws
// InvalidModel for a score that is not a number, and when the pairs exceed what is bounded.
void add_score_merges(const Vocabulary& vocabulary, const std::vector<double>& scores, Bpe& bpe);

}  // namespace pianola
