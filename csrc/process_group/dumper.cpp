// Where and when the call logs of a process are written: CallLog::Dumper.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <typeinfo>
#include <utility>

#include "core/fork.h"
#include "core/threads.h"
#include "process_group/call_log.h"

namespace ringreduce {
namespace {

namespace fs = std::filesystem;

constexpr int kLowestPriority = 19;

void cannot_write(std::int64_t global_rank, const std::exception& error) {
  TORCH_WARN("a group broke; the flight record of rank ", global_rank, " cannot be written: ", error.what());
}

// So many jobs keep their folders.
constexpr std::size_t kJobsKept = 20;

bool names_a_folder(const std::string& job) {
  return !job.empty() && job != "." && job != ".." && job.find('/') == std::string::npos;
}

constexpr char kDropped[] = ".dropped.";  // begins the name of a folder that is being removed

// Other ranks do so at the same time. To remove a folder's files would make it the newest, so it is renamed first.
void drop_oldest(const fs::path& jobs) {
  std::vector<std::pair<fs::file_time_type, fs::path>> found;
  std::error_code gone;
  for (fs::directory_iterator job(jobs, gone), end; job != end; job.increment(gone)) {
    if (job->path().filename().string().starts_with(kDropped))
      fs::remove_all(job->path(), gone);  // whoever began with it may have been killed
    else if (const auto written = job->last_write_time(gone); !gone)
      found.emplace_back(written, job->path());
  }
  std::sort(found.rbegin(), found.rend());
  for (std::size_t i = kJobsKept; i < found.size(); ++i) {
    const fs::path dropped = jobs / (kDropped + found[i].second.filename().string());
    fs::rename(found[i].second, dropped, gone);
    fs::remove_all(dropped, gone);
  }
}

// Written beside and renamed: half a record would be read as a whole one, and where there is no room the earlier stays.
void write_file(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  const fs::path part = path.parent_path() / (".part." + path.filename().string());
  std::ofstream file(part, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (file) return fs::rename(part, path);
  const std::error_code why(errno, std::generic_category());
  std::error_code gone;
  fs::remove(part, gone);
  throw fs::filesystem_error("cannot write", path, why);
}

}  // namespace

// Writes dumps in a thread. Several groups may break at once, or one after the other. Of each job only the latest dump
// is written: it has all calls of the groups that there are, and all dumps for a job go to one file.
class CallLog::Dumper {
 public:
  // The thread is there from now on, and not only while there is something to write.
  void keep_thread() {
    if (keeps_) return;  // without the lock, which the thread may hold for long at its priority
    std::lock_guard lock(mutex_);
    start();
    keeps_ = true;
  }

  void dump(const CallLog& log, Nanoseconds after) {
    std::lock_guard lock(mutex_);
    start();
    next_[log.group_.job] = Dump{snapshot(), log.global_rank(), log.told_where_, now() + after};
    changed_.notify_all();
  }

  void finish(Nanoseconds patience) {
    std::unique_lock lock(mutex_);
    hurries_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::nanoseconds(patience), [this] { return next_.empty() && !writes_; });
  }

 private:
  struct Dump {
    Snapshot calls;
    std::int64_t global_rank;
    bool told_where;
    Nanoseconds due;
  };

  // With the lock held.
  void start() {
    if (runs_) return;
    start_thread([this] { run(); }).detach();
    runs_ = true;
  }

  void run() {
    setpriority(PRIO_PROCESS, 0, kLowestPriority);  // of this thread
    std::unique_lock lock(mutex_);
    while (!next_.empty() || keeps_) {
      const auto first = std::min_element(next_.begin(), next_.end(),
                                          [](const auto& a, const auto& b) { return a.second.due < b.second.due; });
      if (first == next_.end()) {
        changed_.wait(lock);
      } else if (const Nanoseconds left = first->second.due - now(); left > 0 && !hurries_) {
        changed_.wait_for(lock, std::chrono::nanoseconds(left));
      } else {
        const auto dump = next_.extract(first);
        writes_ = true;
        lock.unlock();
        write(dump.key(), std::move(dump.mapped()));
        lock.lock();
        writes_ = false;
        changed_.notify_all();
      }
    }
    runs_ = false;
  }

  static void write(const std::string& job, Dump dump) {
    try {
      auto& writer = c10d::DebugInfoWriter::getWriter(static_cast<int>(dump.global_rank));  // makes directories
      fs::path target = writer.getWriterTarget();
      const bool torchs_own = typeid(writer) == typeid(c10d::DebugInfoWriter);
      const bool by_job = torchs_own && !dump.told_where && names_a_folder(job);
      const fs::path jobs = target.parent_path() / "ringreduce";
      if (by_job) target = jobs / job / c10::str("rank", dump.global_rank);
      TORCH_WARN("a group broke; the flight record of rank ", dump.global_rank, " goes to ", target.string());
      const std::string record = pickle(std::move(dump.calls));
      if (!by_job) return writer.write(record);
      write_file(target, record);
      drop_oldest(jobs);
    } catch (const std::exception& error) {
      cannot_write(dump.global_rank, error);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Dump> next_;  // by job
  std::atomic<bool> keeps_ = false;
  bool runs_ = false;  // the thread
  bool writes_ = false;
  bool hurries_ = false;  // the process is about to end
};

void CallLog::get_ready_to_dump() {
  try {
    process_wide<Dumper>().keep_thread();
  } catch (const std::exception&) {  // write_dump() will say so
  }
}

void CallLog::write_dump(Nanoseconds after) const {
  try {
    process_wide<Dumper>().dump(*this, after);
  } catch (const std::exception& error) {
    cannot_write(global_rank(), error);
  }
}

void CallLog::finish_dumps(Nanoseconds patience) { process_wide<Dumper>().finish(patience); }

}  // namespace ringreduce
