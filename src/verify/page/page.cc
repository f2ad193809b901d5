// SPDX-License-Identifier: Apache-2.0
#include "src/verify/page/page.h"

#include "src/verify/page/page_css.h"
#include "src/verify/page/page_js.h"

namespace fa2::verify {
namespace {

// Text inside an element.
std::string Escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '<') {
      result += "&lt;";
    } else if (c == '&') {
      result += "&amp;";
    } else {
      result += c;
    }
  }
  return result;
}

// JSON inside a script element: '<' stands in strings alone.
std::string EscapedJson(const std::string& json) {
  std::string result;
  for (const char c : json) {
    if (c == '<') {
      result += "\\u003c";
    } else {
      result += c;
    }
  }
  return result;
}

}  // namespace

std::string Page(const std::string& title, const std::string& json,
                 const std::string& script) {
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n"
         "<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" "
         "content=\"width=device-width, initial-scale=1\">\n<title>" +
         Escaped(title) + "</title>\n<style>\n" + kPageCss +
         "</style>\n</head>\n<body>\n<main id=\"main\"></main>\n"
         "<script type=\"application/json\" id=\"data\">" +
         EscapedJson(json) + "</script>\n<script>\n\"use strict\";\n" +
         kPageJs + script + "</script>\n</body>\n</html>\n";
}

}  // namespace fa2::verify
