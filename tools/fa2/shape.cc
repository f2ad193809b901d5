// SPDX-License-Identifier: Apache-2.0
#include "tools/fa2/shape.h"

#include <algorithm>
#include <cctype>

#include "src/verify/cases/error.h"

namespace fa2::tool {
namespace {

[[noreturn]] void Wrong(const std::string& text, const std::string& part) {
  throw verify::Error("--shape is " + text + ", and " + part +
                      " means nothing in it: it must be "
                      "B,H,Hkv,Nq,Nk,D,Dv or B1/H8/KV2/N512x1024/D64");
}

std::vector<std::string> Split(const std::string& text,
                               const std::string& separators) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (separators.find(c) != std::string::npos) {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  return parts;
}

bool IsNumber(const std::string& text) {
  if (text.empty() || text.size() > 12) return false;
  for (const char c : text) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) return false;
  }
  return true;
}

// The sizes that a name sets: one, or two where the value is "ax b".
std::vector<int64_t*> Members(Shape* s, std::string name) {
  for (char& c : name) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (name == "b" || name == "batch") return {&s->batch};
  if (name == "h" || name == "hq" || name == "heads") return {&s->heads};
  if (name == "kv" || name == "hkv" || name == "kv_heads") {
    return {&s->kv_heads};
  }
  if (name == "nq" || name == "sq") return {&s->nq};
  if (name == "nk" || name == "sk") return {&s->nk};
  if (name == "n" || name == "s") return {&s->nq, &s->nk};
  if (name == "d" || name == "head_dim") return {&s->head_dim, &s->value_dim};
  if (name == "dv" || name == "value_dim") return {&s->value_dim};
  return {};
}

}  // namespace

void Shape::Override(const Shape& other) {
  const auto take = [](int64_t from, int64_t* to) {
    if (from != 0) *to = from;
  };
  take(other.batch, &batch);
  take(other.heads, &heads);
  take(other.kv_heads, &kv_heads);
  take(other.nq, &nq);
  take(other.nk, &nk);
  take(other.head_dim, &head_dim);
  take(other.value_dim, &value_dim);
  if (!other.dtype.empty()) dtype = other.dtype;
}

void Shape::Complete() {
  const auto fill = [](int64_t* to, int64_t from) {
    if (*to == 0) *to = from;
  };
  fill(&batch, 1);
  fill(&heads, kv_heads != 0 ? kv_heads : 4);
  fill(&kv_heads, heads);
  fill(&nq, nk != 0 ? nk : 128);
  fill(&nk, nq);
  fill(&head_dim, value_dim != 0 ? value_dim : 64);
  fill(&value_dim, head_dim);
}

std::vector<int64_t> ParseNumbers(const std::string& flag,
                                  const std::string& text) {
  std::vector<int64_t> numbers;
  for (const std::string& part : Split(text, ",x")) {
    if (!IsNumber(part)) {
      throw verify::Error(flag + " is " + text +
                          ", it must be whole numbers with commas between");
    }
    numbers.push_back(std::stoll(part));
  }
  return numbers;
}

Shape ParseShape(const std::string& text) {
  Shape s;
  if (text.empty()) return s;
  if (text.find_first_not_of("0123456789,x ") == std::string::npos) {
    const std::vector<int64_t> n = ParseNumbers("--shape", text);
    switch (n.size()) {
      case 4:
        return {n[0], n[1], n[1], n[2], n[2], n[3], n[3], ""};
      case 5:
        return {n[0], n[1], n[2], n[3], n[3], n[4], n[4], ""};
      case 6:
        return {n[0], n[1], n[2], n[3], n[4], n[5], n[5], ""};
      case 7:
        return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], ""};
      default:
        Wrong(text, std::to_string(n.size()) + " numbers");
    }
  }
  Shape set;
  for (const std::string& part : Split(text, "/,")) {
    if (part == "bf16" || part == "f16" || part == "f32" || part == "f64") {
      set.dtype = part;
      continue;
    }
    size_t digits = part.find_first_of("0123456789");
    std::string name = part.substr(0, digits);
    if (digits == std::string::npos) Wrong(text, part);
    if (!name.empty() && (name.back() == '=' || name.back() == ':')) {
      name.pop_back();
    }
    std::vector<std::string> values = Split(part.substr(digits), "x");
    std::vector<int64_t*> members = Members(&set, name);
    if (members.empty() || values.size() > members.size()) Wrong(text, part);
    for (const std::string& value : values) {
      if (!IsNumber(value)) Wrong(text, part);
    }
    for (size_t i = 0; i < members.size(); ++i) {
      const int64_t value = std::stoll(values[std::min(i, values.size() - 1)]);
      // "D64,Dv32" in any order: a name of its own is not overruled.
      if (i > 0 && values.size() == 1 && *members[i] != 0) continue;
      *members[i] = value;
    }
  }
  return set;
}

}  // namespace fa2::tool
