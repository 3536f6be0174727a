// SPDX-License-Identifier: Apache-2.0
// ge::AscendString as libmetadef.so exports it: the string type of CANN's C++ interfaces.
#pragma once

#include <memory>
#include <string>

namespace ge {

class AscendString {
 public:
  AscendString(const char* text);  // NOLINT: converts, as CANN's does
  bool operator<(const AscendString& other) const;
  const char* GetString() const;

 private:
  std::shared_ptr<std::string> text_;
};

}  // namespace ge
