// SPDX-License-Identifier: Apache-2.0

// All results of a case: the answer in f64, and what the rounding twin gets.
#ifndef FA2_SRC_VERIFY_MODEL_ANSWER_H_
#define FA2_SRC_VERIFY_MODEL_ANSWER_H_

#include <functional>
#include <string>

#include "src/verify/model/array4.h"
#include "src/verify/model/model.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

template <class T>
struct Results {
  Array4<T> out, dq, dk, dv;
  Array4<double> lse;  // [B, H, N, 1], natural
  Array4<double> dbias, dsinks, dalibi_slopes;

  // Row by row, [B, H, N, 1]: what rounding leaves. Of a twin only.
  Array4<RowError> out_error, dq_error, dk_error, dv_error, dbias_error,
      dsinks_error, dalibi_error;
};

using Answer = Results<double>;

enum class Method {
  kKernels,  // fa2's own f64 kernels
  kPlain,    // fa2's plain loops
  kModel,    // the blocked computation
};

// Whether the case is one that fa2's calls do not take: a mask of dropout as a
// tensor, or a bias of packed sequences. Its answer is the model's.
bool NeedsModel(const Problem& problem);

// `forward`: the candidate's out and lse, whose gradients are wanted; nullptr
// for the whole chain. Throws Error where fa2 refuses the case.
Answer ComputeAnswer(const Problem& problem, const Forward* forward,
                     Method method, int threads);

// Every head through RunHead.
template <class T>
Results<T> RunAll(const Problem& problem, const Model& model,
                  const Forward* forward, int threads);

extern template Results<float> RunAll(const Problem&, const Model&,
                                      const Forward*, int);
extern template Results<double> RunAll(const Problem&, const Model&,
                                       const Forward*, int);

// The query heads whose scores use a kv head, in order.
std::vector<int64_t> QueryHeads(const Problem& problem, const Faults& faults,
                                int64_t kv_head);
int64_t KvHead(const Problem& problem, const Faults& faults, int64_t head);

// The model of an honest kernel for this case.
Model TwinModel(const Problem& problem);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_ANSWER_H_
