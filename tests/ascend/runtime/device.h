// Devices and which of them a thread works on. A context is the primary context of a device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "report.h"

namespace standin {

class Stream;

struct Device {
    int32_t number;    // as the process counts them
    int32_t physical;  // as the machine does
    std::atomic<std::size_t> used_bytes{0};
    std::atomic<bool> active{false};  // somebody has set it

    // Takes `size` of the device's memory; false if there is not that much left.
    bool take(std::size_t size);
    void give_back(std::size_t size);
};

// nullptr if there is no such device.
Device *device_at(int64_t number);
// The visible device with this physical number, or nullptr.
Device *device_of_machine(int32_t physical);
// The device of the calling thread; nullptr before it set one.
Device *current_device();

}  // namespace standin
