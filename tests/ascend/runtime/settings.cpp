#include "settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <sstream>

namespace standin {
namespace {

std::string text(const char *name, const char *otherwise) {
    const char *value = std::getenv(name);
    return value != nullptr ? value : otherwise;
}

uint64_t number(const char *name, uint64_t otherwise, uint64_t most) {
    const char *value = std::getenv(name);
    if (value == nullptr) {
        return otherwise;
    }
    char *end = nullptr;
    errno = 0;
    const uint64_t parsed = std::strtoull(value, &end, 10);
    if (*value < '0' || *value > '9' || *end != '\0' || errno != 0 || parsed > most) {
        fatal("%s is '%s': it is a whole number up to %llu", name, value,
              static_cast<unsigned long long>(most));
    }
    return parsed;
}

// As CANN reads it: the list ends at the first entry that is no device of this machine.
std::vector<int32_t> visible_devices(int32_t count) {
    std::vector<int32_t> devices;
    const char *listed = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (listed == nullptr) {
        for (int32_t device = 0; device < count; ++device) {
            devices.push_back(device);
        }
        return devices;
    }
    std::istringstream entries(listed);
    for (std::string entry; std::getline(entries, entry, ',');) {
        const bool is_number = !entry.empty() && entry.size() < 4 &&
                               std::all_of(entry.begin(), entry.end(),
                                           [](char each) { return each >= '0' && each <= '9'; });
        const int32_t device = is_number ? std::stoi(entry) : count;
        if (device >= count || std::count(devices.begin(), devices.end(), device) != 0) {
            break;
        }
        devices.push_back(device);
    }
    return devices;
}

Settings read() {
    Settings read;
    read.visible = visible_devices(
        static_cast<int32_t>(number("ASCEND_STANDIN_DEVICES", 2, 64)));
    read.memory_bytes = number("ASCEND_STANDIN_MEMORY_BYTES", uint64_t{4} << 30, uint64_t{1} << 39);
    read.guarded = number("ASCEND_STANDIN_GUARD", 1, 1) == 1;
    read.delay_us = number("ASCEND_STANDIN_DELAY_US", 0, 60'000'000);
    read.soc = text("ASCEND_STANDIN_SOC", "Ascend910B1");
    read.fault = text("ASCEND_STANDIN_FAULT", "");
    read.fault_file = text("ASCEND_STANDIN_FAULT_FILE", "");
    return read;
}

}  // namespace

const Settings &settings() {
    static const Settings *const once = new Settings(read());
    return *once;
}

}  // namespace standin
