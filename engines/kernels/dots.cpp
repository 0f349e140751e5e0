// The products of narrow.h for every number of tokens. They are as much to compile as all other kernels together, and are
// compiled beside those.

#include "narrow.h"

void dot(const Matrix& m, int64_t row, int64_t step, int n_rows, int n_tokens, const float* x, float* out) {
  switch (n_tokens) {
    case 1: return dot_tokens<1>(m, row, step, n_rows, x, out);
    case 2: return dot_tokens<2>(m, row, step, n_rows, x, out);
    case 3: return dot_tokens<3>(m, row, step, n_rows, x, out);
    case 4: return dot_tokens<4>(m, row, step, n_rows, x, out);
    case 5: return dot_tokens<5>(m, row, step, n_rows, x, out);
    case 6: return dot_tokens<6>(m, row, step, n_rows, x, out);
    case 7: return dot_tokens<7>(m, row, step, n_rows, x, out);
    case 8: return dot_tokens<8>(m, row, step, n_rows, x, out);
  }
}
