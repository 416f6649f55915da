#include "number.h"

#include <cmath>
#include <cstring>

namespace standin {
namespace {

template <typename Number>
Number load_as(const std::byte *at) {
    Number number;
    std::memcpy(&number, at, sizeof number);
    return number;
}

template <typename Number>
bool store_as(Number number, std::byte *at) {
    std::memcpy(at, &number, sizeof number);
    return true;
}

float widened(uint16_t bfloat) {
    const uint32_t bits = uint32_t{bfloat} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// To the nearest, ties to even. Of a NaN its sign and top bits stay.
uint16_t shortened(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (std::isnan(number)) {
        return static_cast<uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

constexpr int kHalfFraction = 10;
constexpr int kHalfBias = 15;

double from_half(uint16_t half) {
    const int exponent = half >> kHalfFraction & 0x1f;
    const int fraction = half & 0x3ff;
    double magnitude = 0;
    if (exponent == 0x1f) {
        magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
    } else if (exponent == 0) {
        magnitude = std::ldexp(fraction, 1 - kHalfBias - kHalfFraction);
    } else {
        magnitude = std::ldexp(fraction + 0x400, exponent - kHalfBias - kHalfFraction);
    }
    return std::copysign(magnitude, (half & 0x8000) != 0 ? -1.0 : 1.0);
}

uint16_t to_half(double number) {
    const auto sign = static_cast<uint16_t>(std::signbit(number) ? 0x8000 : 0);
    const double magnitude = std::fabs(number);
    if (std::isnan(number)) {
        return sign | 0x7e00;
    }
    if (magnitude >= 65520.0) {  // rounds beyond the largest
        return sign | 0x7c00;
    }
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, 1 - kHalfBias);  // subnormal numbers share the lowest
    // In units of the last place; nearbyint rounds ties to even.
    const auto units = static_cast<int>(
        std::nearbyint(std::ldexp(magnitude, kHalfFraction - exponent)));
    if (units == 0) {
        return sign;
    }
    // A carry out of the fraction is one in the exponent, which is what is meant.
    const int biased = units < 0x400 ? 0 : exponent + kHalfBias - 1;
    return static_cast<uint16_t>(sign | ((biased << kHalfFraction) + units));
}

}  // namespace

bool is_floating(aclDataType type) {
    return type == ACL_FLOAT || type == ACL_FLOAT16 || type == ACL_BF16 || type == ACL_DOUBLE;
}

std::optional<double> load_floating(aclDataType type, const std::byte *at) {
    switch (type) {
        case ACL_FLOAT: return load_as<float>(at);
        case ACL_DOUBLE: return load_as<double>(at);
        case ACL_BF16: return widened(load_as<uint16_t>(at));
        case ACL_FLOAT16: return from_half(load_as<uint16_t>(at));
        default: return std::nullopt;
    }
}

std::optional<int64_t> load_integer(aclDataType type, const std::byte *at) {
    switch (type) {
        case ACL_BOOL: return load_as<uint8_t>(at) != 0 ? 1 : 0;
        case ACL_INT8: return load_as<int8_t>(at);
        case ACL_UINT8: return load_as<uint8_t>(at);
        case ACL_INT16: return load_as<int16_t>(at);
        case ACL_INT32: return load_as<int32_t>(at);
        case ACL_INT64: return load_as<int64_t>(at);
        default: return std::nullopt;
    }
}

bool store(aclDataType type, double value, std::byte *at) {
    switch (type) {
        case ACL_FLOAT: return store_as(static_cast<float>(value), at);
        case ACL_DOUBLE: return store_as(value, at);
        case ACL_BF16: return store_as(shortened(static_cast<float>(value)), at);
        case ACL_FLOAT16: return store_as(to_half(value), at);
        case ACL_BOOL: return store_as<uint8_t>(value != 0 ? 1 : 0, at);
        default: return store(type, static_cast<int64_t>(value), at);
    }
}

bool store(aclDataType type, int64_t value, std::byte *at) {
    switch (type) {
        case ACL_BOOL: return store_as<uint8_t>(value != 0 ? 1 : 0, at);
        case ACL_INT8:
        case ACL_UINT8: return store_as(static_cast<uint8_t>(value), at);
        case ACL_INT16: return store_as(static_cast<int16_t>(value), at);
        case ACL_INT32: return store_as(static_cast<int32_t>(value), at);
        case ACL_INT64: return store_as(value, at);
        default: return is_floating(type) && store(type, static_cast<double>(value), at);
    }
}

}  // namespace standin
