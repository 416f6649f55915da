// Numbers of the element types, in and out of their bytes.
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace standin {

bool is_floating(aclDataType type);

// A floating-point element; nothing for other types.
std::optional<double> load_floating(aclDataType type, const std::byte *at);
// An integer or boolean element; nothing for other types.
std::optional<int64_t> load_integer(aclDataType type, const std::byte *at);

// Writes a number as an element, rounded to the nearest; false for types not known here.
bool store(aclDataType type, double value, std::byte *at);
bool store(aclDataType type, int64_t value, std::byte *at);

}  // namespace standin
