#include "engine.h"

#include "faults.h"
#include "wire.h"

using standin::Deadline;
using standin::deadline_in;
using standin::Endpoint;
using standin::Ending;
using standin::Fault;
using standin::Outcome;
using standin::Socket;

namespace adxl {
namespace {

// What an asynchronous transfer, which names no time-out, has.
constexpr int64_t kAsyncTimeoutMs = 60'000;

}  // namespace

Status AdxlEngine::Engine::start(const std::string &local, bool connects_itself) {
    connects_itself_ = connects_itself;
    const Endpoint at = Endpoint::parse(local);
    if (at.port.empty()) {
        return SUCCESS;
    }
    if (const auto wrong = listener_.listen(at)) {
        return ADXL_REFUSE(FAILED, "cannot listen on %s: %s", local.c_str(), wrong->c_str());
    }
    accepting_ = std::thread([this] { accept(); });
    return SUCCESS;
}

AdxlEngine::Engine::~Engine() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        closed_.notify_all();
        for (const auto &[name, peer] : peers_) {
            peer->socket.shut_down();
        }
    }
    listener_.shut_down();
    if (accepting_.joinable()) {
        accepting_.join();
    }
    for (Caller &each : callers_) {
        each.socket.shut_down();
        each.thread.join();
    }
    for (const auto &[request, pending] : pending_) {
        pending->thread.join();
    }
}

Status AdxlEngine::Engine::connect(const std::string &remote, Deadline deadline) {
    if (find(remote) != nullptr) {
        return ADXL_REFUSE(ALREADY_CONNECTED, "%s is connected", remote.c_str());
    }
    return open(remote, deadline);
}

Status AdxlEngine::Engine::open(const std::string &remote, Deadline deadline) {
    const auto peer = std::make_shared<Peer>();
    const Outcome outcome = standin::faults().refuses()
                                ? Outcome::broken
                                : peer->socket.connect(Endpoint::parse(remote), deadline);
    if (outcome != Outcome::done) {
        return ADXL_REFUSE(outcome == Outcome::timed_out ? TIMEOUT : FAILED,
                           "no connection to %s", remote.c_str());
    }
    const std::lock_guard lock(mutex_);
    peers_.emplace(remote, peer);  // another thread's, if it was faster, is as good
    return SUCCESS;
}

Status AdxlEngine::Engine::disconnect(const std::string &remote) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(remote);
    if (found == peers_.end()) {
        return ADXL_REFUSE(NOT_CONNECTED, "%s is not connected", remote.c_str());
    }
    found->second->socket.shut_down();
    peers_.erase(found);
    return SUCCESS;
}

Status AdxlEngine::Engine::transfer(const std::string &remote, TransferOp operation,
                                    const std::vector<TransferOpDesc> &pieces,
                                    Deadline deadline) {
    for (const TransferOpDesc &each : pieces) {
        if (!regions.hold(each.local_addr, each.len)) {
            return ADXL_REFUSE(PARAM_INVALID, "%zu bytes at %#zx here are not registered",
                               each.len, each.local_addr);
        }
    }
    const auto peer = peer_at(remote, deadline);
    if (peer == nullptr) {
        return connects_itself_ ? FAILED
                                : ADXL_REFUSE(NOT_CONNECTED, "%s is not connected",
                                              remote.c_str());
    }
    const Fault fault = standin::faults().next_transfer();
    if (fault == Fault::fail) {
        return ADXL_REFUSE(FAILED, "a transfer to %s was told to fail", remote.c_str());
    }
    if (fault == Fault::stall) {
        wait_out(deadline);
        drop(remote, *peer);
        return ADXL_REFUSE(TIMEOUT, "a transfer to %s was told to stall", remote.c_str());
    }
    const std::lock_guard lock(peer->mutex);
    const Ending ending = fault == Fault::die ? Ending::dies_halfway : Ending::whole;
    const Status status = standin::ask(peer->socket, operation, pieces, ending, deadline);
    if (status == TIMEOUT || status == FAILED) {
        drop(remote, *peer);  // nobody knows where in the bytes it stopped
    }
    return status == SUCCESS ? SUCCESS
                             : ADXL_REFUSE(status, "a transfer to %s", remote.c_str());
}

TransferReq AdxlEngine::Engine::begin(const std::string &remote, TransferOp operation,
                                      const std::vector<TransferOpDesc> &pieces) {
    const auto pending = std::make_shared<Pending>();
    pending->thread = std::thread([this, pending, remote, operation, pieces] {
        const Status status = transfer(remote, operation, pieces, deadline_in(kAsyncTimeoutMs));
        pending->status = status == SUCCESS   ? TransferStatus::COMPLETED
                          : status == TIMEOUT ? TransferStatus::TIMEOUT
                                              : TransferStatus::FAILED;
    });
    const std::lock_guard lock(mutex_);
    pending_[pending.get()] = pending;
    return pending.get();
}

Status AdxlEngine::Engine::status_of(TransferReq request, TransferStatus &status) {
    std::shared_ptr<Pending> ended;
    {
        const std::lock_guard lock(mutex_);
        const auto found = pending_.find(request);
        if (found == pending_.end()) {
            return ADXL_REFUSE(PARAM_INVALID, "%p is no transfer", request);
        }
        status = found->second->status;
        if (status == TransferStatus::WAITING) {
            return SUCCESS;
        }
        ended = found->second;
        pending_.erase(found);
    }
    ended->thread.join();
    return SUCCESS;
}

void AdxlEngine::Engine::accept() {
    for (Socket socket = listener_.accept(); socket.is_open(); socket = listener_.accept()) {
        Caller &caller = callers_.emplace_back();
        caller.socket = std::move(socket);
        caller.thread = std::thread([this, &caller] {
            standin::serve(caller.socket, regions);
            caller.socket.shut_down();
        });
    }
}

std::shared_ptr<AdxlEngine::Engine::Peer> AdxlEngine::Engine::find(const std::string &remote) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(remote);
    return found != peers_.end() ? found->second : nullptr;
}

std::shared_ptr<AdxlEngine::Engine::Peer> AdxlEngine::Engine::peer_at(const std::string &remote,
                                                                      Deadline deadline) {
    auto peer = find(remote);
    if (peer == nullptr && connects_itself_ && open(remote, deadline) == SUCCESS) {
        peer = find(remote);
    }
    return peer;
}

void AdxlEngine::Engine::drop(const std::string &remote, const Peer &peer) {
    peer.socket.shut_down();
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(remote);
    if (found != peers_.end() && found->second.get() == &peer) {
        peers_.erase(found);
    }
}

void AdxlEngine::Engine::wait_out(Deadline deadline) {
    std::unique_lock lock(mutex_);
    closed_.wait_until(lock, deadline, [this] { return closing_; });
}

}  // namespace adxl
