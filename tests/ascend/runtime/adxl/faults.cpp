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

}  // namespace

void Faults::read() {
    std::string text = wording();
    if (text == text_) {
        return;
    }
    fault_ = Fault::none;
    which_ = 0;
    begun_ = 0;
    std::istringstream words(text);
    std::string word;
    if (words >> word) {
        fault_ = named(word);
        if (words >> word) {
            const bool is_number = word.size() < 10 &&
                                   word.find_first_not_of("0123456789") == std::string::npos;
            which_ = is_number ? std::stoull(word) : 0;
            if (which_ == 0 || words >> word) {
                fatal("the fault '%s' is not a word and a number from 1", text.c_str());
            }
        }
    }
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
    const bool struck = which_ == 0 || which_ == begun_;
    return struck ? fault_ : Fault::none;
}

Faults &faults() {
    static Faults *const once = new Faults;
    return *once;
}

}  // namespace standin
