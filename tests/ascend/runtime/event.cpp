// Events: marks in a stream. Each record is a new mark; an event is reached when its latest is.
#include <acl/error_codes/rt_error_codes.h>

#include <map>

#include "stream.h"

namespace standin {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t reached = 0;
    uint64_t waits = 0;  // of streams, not over yet
    Clock::time_point reached_at;

    bool is_reached() const { return recorded != 0 && recorded == reached; }
};

struct Events {
    std::mutex mutex;
    std::map<const void *, std::shared_ptr<Event>> all;
};

Events &events() {
    static Events *const once = new Events;
    return *once;
}

std::shared_ptr<Event> find_event(const char *function, aclrtEvent handle) {
    const std::lock_guard lock(events().mutex);
    const auto found = events().all.find(handle);
    if (found == events().all.end()) {
        refuse(ACL_ERROR_RT_INVALID_HANDLE, function, "%p is no event", handle);
        return nullptr;
    }
    return found->second;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flags) {
    if ((flags & ACL_EVENT_IPC) != 0) {
        return REFUSE(ACL_ERROR_API_NOT_SUPPORT, "events between processes are not implemented");
    }
    const auto event = std::make_shared<Event>();
    const std::lock_guard lock(events().mutex);
    events().all[event.get()] = event;
    *handle = event.get();
    return ACL_SUCCESS;
}

// What makes it different on hardware, how many there can be, is no matter here.
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flags) {
    return aclrtCreateEventExWithFlag(handle, flags);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
    const std::lock_guard lock(events().mutex);
    if (events().all.erase(handle) == 0) {
        return REFUSE(ACL_ERROR_RT_INVALID_HANDLE, "%p is no event", handle);
    }
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    const auto event = find_event(__func__, handle);
    const auto stream = find_stream(__func__, stream_handle);
    if (event == nullptr || stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    uint64_t mark = 0;
    {
        const std::lock_guard lock(event->mutex);
        mark = ++event->recorded;
    }
    stream->submit(
        [event, mark] {
            const std::lock_guard lock(event->mutex);
            event->reached = std::max(event->reached, mark);
            event->reached_at = Clock::now();
            event->changed.notify_all();
            return ACL_SUCCESS;
        },
        false);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    const auto event = find_event(__func__, handle);
    if (event == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    const std::lock_guard lock(event->mutex);
    *status = event->is_reached() ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                  : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    const auto event = find_event(__func__, handle);
    if (event == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    const std::lock_guard lock(event->mutex);
    *status = event->waits == 0 ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

// An event that nobody recorded holds nobody up.
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    const auto event = find_event(__func__, handle);
    if (event == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    std::unique_lock lock(event->mutex);
    const uint64_t mark = event->recorded;
    event->changed.wait(lock, [&] { return event->reached >= mark; });
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    const auto event = find_event(__func__, handle);
    const auto stream = find_stream(__func__, stream_handle);
    if (event == nullptr || stream == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    uint64_t mark = 0;
    {
        const std::lock_guard lock(event->mutex);
        mark = event->recorded;
        ++event->waits;
    }
    stream->submit(
        [event, mark] {
            std::unique_lock lock(event->mutex);
            event->changed.wait(lock, [&] { return event->reached >= mark; });
            --event->waits;
            return ACL_SUCCESS;
        },
        false);
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    const auto first = find_event(__func__, start);
    const auto last = find_event(__func__, end);
    if (first == nullptr || last == nullptr) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    Clock::time_point times[2];
    for (const auto &[event, time] : {std::pair(first, &times[0]), std::pair(last, &times[1])}) {
        const std::lock_guard lock(event->mutex);
        if (!event->is_reached()) {
            return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "an event is not reached yet");
        }
        *time = event->reached_at;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
    return ACL_SUCCESS;
}
}
