// The operators that move and compare tensors. Nothing else: an operator that is not here is not
// exported, and torch_npu says its name when it looks for it.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "number.h"
#include "tensor.h"

namespace standin {
namespace {

aclError out_of_memory_bounds(const char *name) {
    return refuse(ACL_ERROR_INVALID_PARAM, name,
                  "a tensor's bytes are not all device memory (freed before the operator ran?)");
}

int64_t count_of(const aclTensor &tensor) {
    return std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1},
                           std::multiplies<>());
}

aclError check_types(const char *name, std::initializer_list<const aclTensor *> tensors) {
    for (const aclTensor *each : tensors) {
        if (each == nullptr) {
            return refuse(ACL_ERROR_INVALID_PARAM, name, "a tensor is missing");
        }
        if (element_size(each->type) == 0) {
            return refuse(ACL_ERROR_UNSUPPORTED_DATA_TYPE, name,
                          "elements of type %d are not implemented", each->type);
        }
    }
    return ACL_SUCCESS;
}

aclError fill(const char *name, const aclTensor &tensor, const std::vector<std::byte> &element) {
    if (count_of(tensor) == 0) {
        return ACL_SUCCESS;
    }
    const Pin pin;
    std::byte *const data = reach(pin, tensor);
    if (data == nullptr) {
        return out_of_memory_bounds(name);
    }
    visit_runs(tensor, data, tensor, data,
               [&](std::byte *at, std::byte *, std::size_t count) {
                   const std::size_t size = count * element.size();
                   std::copy(element.begin(), element.end(), at);
                   for (std::size_t filled = element.size(); filled < size;) {
                       const std::size_t piece = std::min(filled, size - filled);
                       std::memcpy(at + filled, at, piece);
                       filled += piece;
                   }
                   return true;
               });
    return ACL_SUCCESS;
}

// `source` seen in the shape of `target`, as torch broadcasts; nothing if it does not fit.
std::optional<aclTensor> broadcast(const aclTensor &source, const aclTensor &target) {
    if (source.shape.size() > target.shape.size()) {
        return std::nullopt;
    }
    aclTensor seen = source;
    const std::size_t added = target.shape.size() - source.shape.size();
    seen.shape = target.shape;
    seen.strides.insert(seen.strides.begin(), added, 0);
    for (std::size_t dimension = added; dimension < target.shape.size(); ++dimension) {
        const int64_t length = source.shape[dimension - added];
        if (length == 1) {
            seen.strides[dimension] = 0;
        } else if (length != target.shape[dimension]) {
            return std::nullopt;
        }
    }
    return seen;
}

bool convert_run(const aclTensor &target, std::byte *to, const aclTensor &source,
                 const std::byte *from, std::size_t count) {
    const std::size_t to_size = element_size(target.type);
    const std::size_t from_size = element_size(source.type);
    for (std::size_t each = 0; each < count; ++each, to += to_size, from += from_size) {
        const auto floating = load_floating(source.type, from);
        const auto integer = load_integer(source.type, from);
        const bool stored = floating  ? store(target.type, *floating, to)
                            : integer ? store(target.type, *integer, to)
                                      : false;
        if (!stored) {
            return false;
        }
    }
    return true;
}

aclError copy(const char *name, const aclTensor &target, const aclTensor &source) {
    if (count_of(target) == 0) {
        return ACL_SUCCESS;
    }
    const Pin pin;
    std::byte *const to = reach(pin, target);
    std::byte *const from = reach(pin, source);
    if (to == nullptr || from == nullptr) {
        return out_of_memory_bounds(name);
    }
    const std::size_t size = element_size(target.type);
    const bool done = visit_runs(
        target, to, source, from, [&](std::byte *to, std::byte *from, std::size_t count) {
            if (target.type == source.type) {
                std::memmove(to, from, count * size);
                return true;
            }
            return convert_run(target, to, source, from, count);
        });
    return done ? ACL_SUCCESS
                : refuse(ACL_ERROR_UNSUPPORTED_DATA_TYPE, name,
                         "a copy from type %d to type %d is not implemented", source.type,
                         target.type);
}

// Floating-point numbers compare as numbers: NaN is not equal to itself.
bool is_equal_run(aclDataType type, const std::byte *first, const std::byte *second,
                  std::size_t count) {
    const std::size_t size = element_size(type);
    if (!is_floating(type)) {
        return std::memcmp(first, second, count * size) == 0;
    }
    for (std::size_t each = 0; each < count; ++each) {
        if (load_floating(type, first + each * size) != load_floating(type, second + each * size)) {
            return false;
        }
    }
    return true;
}

aclError equal(const char *name, const aclTensor &first, const aclTensor &second,
               const aclTensor &result) {
    const Pin pin;
    std::byte *const answer = reach(pin, result);
    bool same = first.shape == second.shape;
    if (same && count_of(first) != 0) {
        std::byte *const first_data = reach(pin, first);
        std::byte *const second_data = reach(pin, second);
        if (first_data == nullptr || second_data == nullptr) {
            return out_of_memory_bounds(name);
        }
        same = visit_runs(first, first_data, second, second_data,
                          [&](std::byte *one, std::byte *other, std::size_t count) {
                              return is_equal_run(first.type, one, other, count);
                          });
    }
    if (answer == nullptr) {
        return out_of_memory_bounds(name);
    }
    *answer = std::byte{same};
    return ACL_SUCCESS;
}

}  // namespace

std::optional<std::vector<std::byte>> converted(const aclScalar &scalar, aclDataType type) {
    if (scalar.type == type) {
        return scalar.bytes;
    }
    std::vector<std::byte> bytes(element_size(type));
    const auto floating = load_floating(scalar.type, scalar.bytes.data());
    const auto integer = load_integer(scalar.type, scalar.bytes.data());
    const bool stored = floating  ? store(type, *floating, bytes.data())
                        : integer ? store(type, *integer, bytes.data())
                                  : false;
    return stored ? std::optional(bytes) : std::nullopt;
}

}  // namespace standin

using namespace standin;

extern "C" {

STANDIN_API aclError aclnnInplaceZeroGetWorkspaceSize(const aclTensor *self, uint64_t *workspace,
                                                      aclOpExecutor **executor) {
    constexpr auto name = "aclnnInplaceZero";
    if (const aclError result = check_types(name, {self}); result != ACL_SUCCESS) {
        return result;
    }
    const std::vector<std::byte> zero(element_size(self->type));
    return prepare(name, workspace, executor,
                   [=, tensor = *self] { return fill(name, tensor, zero); });
}

STANDIN_API aclError aclnnInplaceZero(void *, uint64_t, aclOpExecutor *executor,
                                      aclrtStream stream) {
    return launch(executor, stream);
}

STANDIN_API aclError aclnnInplaceFillScalarGetWorkspaceSize(const aclTensor *self,
                                                            const aclScalar *value,
                                                            uint64_t *workspace,
                                                            aclOpExecutor **executor) {
    constexpr auto name = "aclnnInplaceFillScalar";
    if (const aclError result = check_types(name, {self}); result != ACL_SUCCESS) {
        return result;
    }
    const auto element = converted(*value, self->type);
    if (!element) {
        return refuse(ACL_ERROR_UNSUPPORTED_DATA_TYPE, name,
                      "a fill of type %d with a scalar of type %d is not implemented", self->type,
                      value->type);
    }
    return prepare(name, workspace, executor,
                   [=, tensor = *self] { return fill(name, tensor, *element); });
}

STANDIN_API aclError aclnnInplaceFillScalar(void *, uint64_t, aclOpExecutor *executor,
                                            aclrtStream stream) {
    return launch(executor, stream);
}

STANDIN_API aclError aclnnInplaceCopyGetWorkspaceSize(const aclTensor *self,
                                                      const aclTensor *source, uint64_t *workspace,
                                                      aclOpExecutor **executor) {
    constexpr auto name = "aclnnInplaceCopy";
    if (const aclError result = check_types(name, {self, source}); result != ACL_SUCCESS) {
        return result;
    }
    const auto seen = broadcast(*source, *self);
    if (!seen) {
        return refuse(ACL_ERROR_INVALID_PARAM, name, "the source does not fit the target's shape");
    }
    return prepare(name, workspace, executor,
                   [=, target = *self] { return copy(name, target, *seen); });
}

STANDIN_API aclError aclnnInplaceCopy(void *, uint64_t, aclOpExecutor *executor,
                                      aclrtStream stream) {
    return launch(executor, stream);
}

STANDIN_API aclError aclnnEqualGetWorkspaceSize(const aclTensor *self, const aclTensor *other,
                                                aclTensor *result, uint64_t *workspace,
                                                aclOpExecutor **executor) {
    constexpr auto name = "aclnnEqual";
    if (const aclError code = check_types(name, {self, other, result}); code != ACL_SUCCESS) {
        return code;
    }
    if (self->type != other->type || result->type != ACL_BOOL) {
        return refuse(ACL_ERROR_UNSUPPORTED_DATA_TYPE, name,
                      "types %d and %d into type %d are not implemented", self->type, other->type,
                      result->type);
    }
    return prepare(name, workspace, executor,
                   [=, first = *self, second = *other, answer = *result] {
                       return equal(name, first, second, answer);
                   });
}

STANDIN_API aclError aclnnEqual(void *, uint64_t, aclOpExecutor *executor, aclrtStream stream) {
    return launch(executor, stream);
}
}
