// What the operators work on, and how they are called: aclnnNameGetWorkspaceSize checks the
// arguments and makes an executor, aclnnName puts it on a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "../arena.h"
#include "../report.h"

struct aclTensor {
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;  // in elements, as `offset` is
    int64_t offset;
    aclDataType type;
    void *data;
};

struct aclScalar {
    aclDataType type;
    std::vector<std::byte> bytes;
};

struct aclOpExecutor {
    const char *name;
    std::function<aclError()> run;
};

namespace standin {

// Bytes of one element; 0 for types that the operators here do not know.
std::size_t element_size(aclDataType type);

// A scalar as one element of another type; nothing if there is no way from one to the other.
std::optional<std::vector<std::byte>> converted(const aclScalar &scalar, aclDataType type);

// Where the host finds the first element; nullptr if not all of the tensor is memory.
std::byte *reach(const Pin &pin, const aclTensor &tensor);

// Calls `visit(first, second, count)` for the elements of both, in order and in runs that are
// contiguous in both; the shapes are equal.
using Visit = std::function<bool(std::byte *, std::byte *, std::size_t count)>;
bool visit_runs(const aclTensor &first, std::byte *first_data, const aclTensor &second,
                std::byte *second_data, const Visit &visit);

aclError prepare(const char *name, uint64_t *workspace_size, aclOpExecutor **executor,
                 std::function<aclError()> run);
aclError launch(aclOpExecutor *executor, aclrtStream stream);

}  // namespace standin
