#include "tensor.h"

#include <cstring>

#include "../stream.h"

namespace standin {
namespace {

// The last dimensions that both tensors hold as one piece: their number and their elements.
std::pair<std::size_t, int64_t> common_run(const aclTensor &first, const aclTensor &second) {
    std::size_t dimension = first.shape.size();
    int64_t run = 1;
    while (dimension > 0 && first.strides[dimension - 1] == run &&
           second.strides[dimension - 1] == run) {
        run *= first.shape[dimension - 1];
        --dimension;
    }
    return {dimension, run};
}

}  // namespace

std::size_t element_size(aclDataType type) {
    switch (type) {
        case ACL_INT8:
        case ACL_UINT8:
        case ACL_BOOL:
        case ACL_FLOAT8_E5M2:
        case ACL_FLOAT8_E4M3FN: return 1;
        case ACL_FLOAT16:
        case ACL_BF16:
        case ACL_INT16:
        case ACL_UINT16: return 2;
        case ACL_FLOAT:
        case ACL_INT32:
        case ACL_UINT32: return 4;
        case ACL_DOUBLE:
        case ACL_INT64:
        case ACL_UINT64: return 8;
        default: return 0;
    }
}

std::byte *reach(const Pin &pin, const aclTensor &tensor) {
    const auto size = static_cast<int64_t>(element_size(tensor.type));
    int64_t last = 0;
    for (std::size_t dimension = 0; dimension < tensor.shape.size(); ++dimension) {
        last += (tensor.shape[dimension] - 1) * tensor.strides[dimension];
    }
    auto *const first = static_cast<std::byte *>(tensor.data) + tensor.offset * size;
    return pin.reach(first, static_cast<std::size_t>((last + 1) * size));
}

bool visit_runs(const aclTensor &first, std::byte *first_data, const aclTensor &second,
                std::byte *second_data, const Visit &visit) {
    for (const int64_t length : first.shape) {
        if (length == 0) {
            return true;
        }
    }
    const auto [outer, run] = common_run(first, second);
    const auto first_size = static_cast<int64_t>(element_size(first.type));
    const auto second_size = static_cast<int64_t>(element_size(second.type));
    std::vector<int64_t> index(outer, 0);
    for (;;) {
        int64_t first_at = 0;
        int64_t second_at = 0;
        for (std::size_t dimension = 0; dimension < outer; ++dimension) {
            first_at += index[dimension] * first.strides[dimension];
            second_at += index[dimension] * second.strides[dimension];
        }
        if (!visit(first_data + first_at * first_size, second_data + second_at * second_size,
                   static_cast<std::size_t>(run))) {
            return false;
        }
        std::size_t dimension = outer;
        while (dimension > 0 && ++index[dimension - 1] == first.shape[dimension - 1]) {
            index[--dimension] = 0;
        }
        if (dimension == 0) {
            return true;
        }
    }
}

aclError prepare(const char *name, uint64_t *workspace_size, aclOpExecutor **executor,
                 std::function<aclError()> run) {
    *workspace_size = 0;
    *executor = new aclOpExecutor{name, std::move(run)};
    return ACL_SUCCESS;
}

// An executor runs once, as CANN's do unless they are made repeatable.
aclError launch(aclOpExecutor *executor, aclrtStream stream) {
    const aclError result = submit(executor->name, stream, std::move(executor->run));
    delete executor;
    return result;
}

}  // namespace standin

extern "C" {

STANDIN_API aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dimensions, aclDataType type,
                                       const int64_t *strides, int64_t offset, aclFormat,
                                       const int64_t *, uint64_t, void *data) {
    return new aclTensor{{shape, shape + dimensions}, {strides, strides + dimensions}, offset, type,
                         data};
}

STANDIN_API int aclDestroyTensor(const aclTensor *tensor) {
    delete tensor;
    return ACL_SUCCESS;
}

STANDIN_API aclScalar *aclCreateScalar(const void *value, aclDataType type) {
    const std::size_t size = standin::element_size(type);
    if (size == 0) {
        REFUSE(ACL_ERROR_UNSUPPORTED_DATA_TYPE, "a scalar of type %d", type);
        return nullptr;
    }
    const auto *const bytes = static_cast<const std::byte *>(value);
    return new aclScalar{type, {bytes, bytes + size}};
}

STANDIN_API int aclDestroyScalar(const aclScalar *scalar) {
    delete scalar;
    return ACL_SUCCESS;
}

STANDIN_API int aclDestroyAclOpExecutor(aclOpExecutor *executor) {
    delete executor;
    return ACL_SUCCESS;
}
}
