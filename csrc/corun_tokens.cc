// Which runtime a token, or a stream of XLA's, stands for.

#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "corun_runtime.h"

namespace recom::corun {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<uintptr_t, std::pair<std::weak_ptr<Runtime>, int>> tokens;
  std::map<Stream, std::weak_ptr<Runtime>> current;
  static Registry& get() {
    static auto* r = new Registry;  // never destroyed: runtimes may die during exit
    return *r;
  }
};

}  // namespace

void register_token(uintptr_t token, const std::shared_ptr<Runtime>& runtime, int slot) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  Registry::get().tokens[token] = {runtime, slot};
}

void forget_tokens(const Runtime* runtime) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  auto& tokens = Registry::get().tokens;
  for (auto it = tokens.begin(); it != tokens.end();) {
    const auto r = it->second.first.lock();
    it = !r || r.get() == runtime ? tokens.erase(it) : std::next(it);
  }
}

std::pair<std::shared_ptr<Runtime>, int> find_token(const void* token) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  const auto it = Registry::get().tokens.find(reinterpret_cast<uintptr_t>(token));
  std::shared_ptr<Runtime> found;
  if (it != Registry::get().tokens.end()) found = it->second.first.lock();
  if (!found)
    throw std::runtime_error(
        "recom corun: a step was handed no batch of a pipeline of this process; run it through "
        "the pipeline that compiled it");
  return {found, it->second.second};
}

std::shared_ptr<Runtime> current_runtime(Stream xla) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  const auto& current = Registry::get().current;
  auto it = current.find(xla);
  // XLA may run a part of a step on another stream than that on which it took the batch.
  if (it == current.end() && current.size() == 1) it = current.begin();
  return it == current.end() ? nullptr : it->second.lock();
}

void set_current_runtime(Stream xla, const std::shared_ptr<Runtime>& runtime) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  Registry::get().current[xla] = runtime;
}

}  // namespace recom::corun
