#include "faults.h"

#include <fstream>
#include <iterator>
#include <sstream>

#include "../settings.h"

namespace standin {
namespace {

std::string wording() {
    const Settings &all = settings();
    if (all.fault_file.empty()) {
        return all.fault;
    }
    std::ifstream file(all.fault_file);  // one that is not there asks for nothing
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Fault named(const std::string &word) {
    if (word == "refuse") return Fault::refuse;
    if (word == "stall") return Fault::stall;
    if (word == "fail") return Fault::fail;
    if (word == "die") return Fault::die;
    fatal("the fault '%s' is unknown: it is refuse, stall, fail or die", word.c_str());
}

// "3" is the third alone, "3-4" that and the next, "3-" that and all later ones.
bool parse(const std::string &text, uint64_t &first, uint64_t &last) {
    const auto dash = text.find('-');
    const std::string start = text.substr(0, dash);
    const std::string end = dash == std::string::npos ? start : text.substr(dash + 1);
    for (const std::string &each : {start, end}) {
        if (each.size() > 9 || each.find_first_not_of("0123456789") != std::string::npos) {
            return false;
        }
    }
    if (start.empty()) {
        return false;
    }
    first = std::stoull(start);
    last = end.empty() ? UINT64_MAX : std::stoull(end);
    return first > 0 && first <= last;
}

}  // namespace

void Faults::read() {
    std::string text = wording();
    if (text == text_) {
        return;
    }
    std::istringstream words(text);
    std::string word;
    std::string which = "1-";
    fault_ = words >> word ? named(word) : Fault::none;
    words >> which;
    if (!parse(which, first_, last_) || words >> word) {
        fatal("the fault '%s' is not a word and which: 3, 3-4 or 3-", text.c_str());
    }
    begun_ = 0;
    text_ = std::move(text);
}

bool Faults::refuses() {
    const std::lock_guard lock(mutex_);
    read();
    return fault_ == Fault::refuse;
}

Fault Faults::next_transfer() {
    const std::lock_guard lock(mutex_);
    read();
    ++begun_;
    return begun_ >= first_ && begun_ <= last_ ? fault_ : Fault::none;
}

Faults &faults() {
    static Faults *const once = new Faults;
    return *once;
}

}  // namespace standin
