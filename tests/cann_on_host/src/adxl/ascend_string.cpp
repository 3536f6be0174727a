// SPDX-License-Identifier: Apache-2.0
#include "ascend_string.h"

namespace ge {

AscendString::AscendString(const char* text) : text_(std::make_shared<std::string>(text)) {}
bool AscendString::operator<(const AscendString& other) const { return *text_ < *other.text_; }
const char* AscendString::GetString() const { return text_->c_str(); }

}  // namespace ge
