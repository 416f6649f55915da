// libmetadef: the string that crosses the border of Mooncake and the transfer engine.

// CANN's header leaves the visibility to whoever builds the library.
#pragma GCC visibility push(default)
#include <graph/ascend_string.h>
#pragma GCC visibility pop

namespace ge {

AscendString::AscendString(const char_t *const name) {
    if (name != nullptr) {
        name_ = std::make_shared<std::string>(name);
    }
}

const char_t *AscendString::GetString() const { return name_ == nullptr ? "" : name_->c_str(); }

// One without a string comes before all others.
bool AscendString::operator<(const AscendString &other) const {
    if (name_ == nullptr || other.name_ == nullptr) {
        return name_ == nullptr && other.name_ != nullptr;
    }
    return *name_ < *other.name_;
}

}  // namespace ge
