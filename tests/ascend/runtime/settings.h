// What the environment says about the pretended machine; README.md lists the variables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "report.h"

namespace standin {

struct Settings {
    std::vector<int32_t> visible;  // physical number of each device that the process sees
    std::size_t memory_bytes;      // per device
    bool guarded;                  // a host access to device memory faults
    uint64_t delay_us;             // before each operation of a stream
    std::string soc;
    std::string fault;       // ASCEND_STANDIN_FAULT
    std::string fault_file;  // ASCEND_STANDIN_FAULT_FILE
};

// Read once, at the first call.
STANDIN_API const Settings &settings();

}  // namespace standin
