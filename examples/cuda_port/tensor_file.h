// SPDX-License-Identifier: Apache-2.0

// safetensors files, as much as this example needs: what `fa2 gen` writes and
// what `fa2 verify` reads. Eight bytes of length, a JSON header, the data.
#ifndef FA2_EXAMPLES_CUDA_PORT_TENSOR_FILE_H_
#define FA2_EXAMPLES_CUDA_PORT_TENSOR_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

struct Tensor {
  std::string name;
  std::string dtype;  // "BF16", "F32"
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

class TensorFile {
 public:
  // Throws std::runtime_error with a sentence.
  static TensorFile Read(const std::string& path);

  // Of dtype BF16 and four dimensions; throws std::runtime_error.
  const Tensor& Get(const std::string& name) const;
  // Whether an option of the case, such as causal, has this value.
  bool OptionIs(const std::string& name, const std::string& value) const;

 private:
  std::string path_, header_;
  std::vector<Tensor> tensors_;
};

void WriteTensors(const std::string& path, const std::vector<Tensor>& tensors);

#endif  // FA2_EXAMPLES_CUDA_PORT_TENSOR_FILE_H_
