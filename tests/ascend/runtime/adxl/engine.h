// One engine: it listens, keeps connections and does transfers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <thread>

#include "adxl.h"
#include "regions.h"
#include "socket.h"

#define ADXL_REFUSE(code, ...)         \
    static_cast<::adxl::Status>(       \
        ::standin::refuse(static_cast<aclError>(code), __func__, __VA_ARGS__))

namespace adxl {

class __attribute__((visibility("hidden"))) AdxlEngine::Engine {
public:
    Engine() = default;
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    // With `connects_itself` a transfer makes the connection that it needs.
    Status start(const std::string &local, bool connects_itself);
    Status connect(const std::string &remote, standin::Deadline deadline);
    Status disconnect(const std::string &remote);
    Status transfer(const std::string &remote, TransferOp operation,
                    const std::vector<TransferOpDesc> &pieces, standin::Deadline deadline);
    // A transfer in a thread of its own. A request whose end was told is forgotten.
    TransferReq begin(const std::string &remote, TransferOp operation,
                      const std::vector<TransferOpDesc> &pieces);
    Status status_of(TransferReq request, TransferStatus &status);

    standin::Regions regions;

private:
    struct Peer {
        std::mutex mutex;  // held during a transfer: one at a time over a connection
        standin::Socket socket;
    };

    struct Caller {
        standin::Socket socket;
        std::thread thread;
    };

    struct Pending {
        std::atomic<TransferStatus> status{TransferStatus::WAITING};
        std::thread thread;
    };

    void accept();
    Status open(const std::string &remote, standin::Deadline deadline);
    std::shared_ptr<Peer> find(const std::string &remote);
    std::shared_ptr<Peer> peer_at(const std::string &remote, standin::Deadline deadline);
    // Forgets a connection, unless a new one has its name already.
    void drop(const std::string &remote, const Peer &peer);
    void wait_out(standin::Deadline deadline);

    bool connects_itself_ = false;
    standin::Socket listener_;
    std::thread accepting_;
    std::list<Caller> callers_;  // grows in `accepting_` only
    std::mutex mutex_;
    std::condition_variable closed_;
    bool closing_ = false;
    std::map<std::string, std::shared_ptr<Peer>> peers_;
    std::map<TransferReq, std::shared_ptr<Pending>> pending_;
};

}  // namespace adxl
