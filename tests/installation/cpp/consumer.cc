// SPDX-License-Identifier: Apache-2.0

// One head of one query and one key: softmax is 1, so out = v, dv = dout and
// dq = dk = 0. Exits 0 if the installed library says so.
#include <fa2/attention.h>
#include <fa2/fa2_c.h>
#include <fa2/reference.h>

#include <iostream>
#include <memory>
#include <string>

int main(int argc, char** argv) {
  if (argc != 2 || std::string(argv[1]) != fa2_version_string()) {
    std::cerr << "the library is version " << fa2_version_string() << "\n";
    return 1;
  }
  const float q = 2.0f, k = 3.0f, v = 5.0f, dout = 7.0f;
  float out = -1.0f, lse = -1.0f, dq = -1.0f, dk = -1.0f, dv = -1.0f;
  const auto in = [](const float* x) {
    return fa2::Dense(x, fa2::DType::kF32, 1, 1, 1, 1);
  };
  const auto to = [](float* x) {
    return fa2::Dense(x, fa2::DType::kF32, 1, 1, 1, 1);
  };
  std::unique_ptr<fa2::Context> context;
  fa2::Status status = fa2::Context::Create({}, &context);
  if (status.ok()) {
    fa2::AttentionForwardArgs args;
    args.q = in(&q);
    args.k = in(&k);
    args.v = in(&v);
    args.out = to(&out);
    args.lse = to(&lse);
    status = fa2::AttentionForward(args, context.get());
  }
  if (status.ok()) {
    fa2::AttentionBackwardArgs args;
    args.dout = in(&dout);
    args.q = in(&q);
    args.k = in(&k);
    args.v = in(&v);
    args.out = in(&out);
    args.lse = in(&lse);
    args.dq = to(&dq);
    args.dk = to(&dk);
    args.dv = to(&dv);
    status = fa2::AttentionBackward(args, context.get());
  }
  if (!status.ok()) {
    std::cerr << status.message() << "\n";
    return 1;
  }
  std::cout << "out " << out << ", lse " << lse << ", dq " << dq << ", dk "
            << dk << ", dv " << dv << "\n";
  return out == v && lse == q * k && dq == 0.0f && dk == 0.0f && dv == dout ? 0
                                                                            : 1;
}
