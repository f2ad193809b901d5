// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/truth.h"

#include <type_traits>

namespace fa2::verify {
namespace {

// The arrays of a run by their names; those that are as wide as the products.
template <class T>
const Array4<T>* Narrow(const Results<T>& r, const std::string& name) {
  if (name == "out") return &r.out;
  if (name == "dq") return &r.dq;
  if (name == "dk") return &r.dk;
  if (name == "dv") return &r.dv;
  return nullptr;
}

template <class T>
const Array4<double>* Member(const Results<T>& r, const std::string& name) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* narrow = Narrow(r, name)) return narrow;
  }
  if (name == "lse") return &r.lse;
  if (name == "dbias") return &r.dbias;
  if (name == "dsinks") return &r.dsinks;
  return &r.dalibi_slopes;
}

template <class T>
const Array4<RowError>* ErrorOf(const Results<T>& r, const std::string& name) {
  if (name == "out") return &r.out_error;
  if (name == "dq") return &r.dq_error;
  if (name == "dk") return &r.dk_error;
  if (name == "dv") return &r.dv_error;
  if (name == "dbias") return &r.dbias_error;
  if (name == "dsinks") return &r.dsinks_error;
  if (name == "dalibi_slopes") return &r.dalibi_error;
  return nullptr;
}

}  // namespace

Expected Truth::Of(const std::string& name) const {
  Expected e;
  e.answer = Member(answer, name);
  if (twin_f32) {
    e.twin_f32 = Narrow(*twin_f32, name);
    if (e.twin_f32 == nullptr) e.twin_f64 = Member(*twin_f32, name);
    e.error = ErrorOf(*twin_f32, name);
  } else {
    e.twin_f64 = Member(*twin_f64, name);
    e.error = ErrorOf(*twin_f64, name);
  }
  return e;
}

Truth ComputeTruth(const Problem& problem, const Forward* forward, bool plain,
                   int threads) {
  Truth truth;
  truth.answer = ComputeAnswer(
      problem, forward, plain ? Method::kPlain : Method::kKernels, threads);
  Model model = TwinModel(problem);
  model.given = forward != nullptr;
  if (problem.products == Products::kF64) {
    truth.twin_f64 = RunAll<double>(problem, model, forward, threads);
  } else {
    truth.twin_f32 = RunAll<float>(problem, model, forward, threads);
  }
  return truth;
}

}  // namespace fa2::verify
