// Ranks on several hosts: the same calls and messages as on one, over links, and what links do when peers fail or lie.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <thread>

#include "engine/monitored_barrier.h"
#include "stress/harness.h"
#include "transport/frame.h"
#include "transport/links.h"

namespace ringreduce::stress {
namespace {

using Layout = std::vector<int>;  // the host of each rank

const std::array<Layout, 5> kLayouts{Layout{0, 1}, {0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 1, 1, 2}};

std::string text(const Layout& hosts) {
  std::string result = "hosts";
  for (const int host : hosts) result += " " + std::to_string(host);
  return result;
}

void collectives(const Layout& hosts, bool linked) {
  Group group(static_cast<int>(hosts.size()), 16, 256, hosts, linked);
  if (linked) group.link(0, static_cast<int>(hosts.size()) - 1);  // two connections between two ranks
  on_all_ranks(group, [&](Rank& rank) {
    Random pause(static_cast<std::uint64_t>(rank.number()));
    for (std::uint64_t number = 0; number < 300; ++number) {
      run_scripted(rank, hosts.size(), number);
      if (random_int(pause, 0, 49) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    monitored_barrier(*rank.team, kPatience, 20 * kSecond, true);
  });
  std::printf("%s: 300 calls\n", text(hosts).c_str());
}

void messages(const Layout& hosts) {
  Group group(static_cast<int>(hosts.size()), 8, 256, hosts, false);
  on_all_ranks(group, [](Rank& rank) {
    for (int round = 0; round < 20; ++round) exchange_messages(rank, round);
  });
  std::printf("%s: messages\n", text(hosts).c_str());
}

void other_calls(const Layout& hosts) {
  const int size = static_cast<int>(hosts.size());
  Group group(size, 8, 256, hosts);
  on_all_ranks(group, [&](Rank& rank) {
    for (std::uint64_t number = 0; number < 20; ++number) run_scripted(rank, 1, number);
    rank.engine.choose(Operation::all_reduce, ~std::uint64_t{0}, 0);
    const Error error = error_of([&] { run_all_reduce(rank, rank.number() == size - 1 ? 3000 : 2000, 60 * kSecond); });
    check(error.kind() == ErrorKind::mismatch && std::strstr(error.what(), "3000") != nullptr,
          std::string("mismatch over hosts: ") + error.what());
  });
  std::printf("%s: mismatch\n", text(hosts).c_str());
}

void never_comes(const Layout& hosts) {
  Group group(static_cast<int>(hosts.size()), 8, 256, hosts);
  on_all_ranks(group, [&](Rank& rank) {
    if (rank.number() == 1) return;
    const Error error = error_of([&] { run_all_reduce(rank, 2000, 300 * kMillisecond); });
    check(error.kind() == ErrorKind::timeout && error.culprit() == 1,
          std::string("timeout over hosts: ") + error.what());
  });
  std::printf("%s: timeout\n", text(hosts).c_str());
}

void leaves(const Layout& hosts) {
  Group group(static_cast<int>(hosts.size()), 8, 256, hosts);
  on_all_ranks(group, [&](Rank& rank) {
    if (rank.number() == 1) {
      for (std::uint64_t number = 0; number < 25; ++number) run_scripted(rank, 3, number);
      group.ranks[1] = nullptr;
      return;
    }
    const Error error = error_of([&] {
      for (std::uint64_t number = 0;; ++number) run_scripted(rank, 3, number);
    });
    check(error.kind() == ErrorKind::peer_lost && error.culprit() == 1,
          std::string("leaving over hosts: ") + error.what());
  });
  std::printf("%s: a rank leaves\n", text(hosts).c_str());
}

// Fills in a slot's header for a random value: packed or not, up to `most` bytes.
void fill_in_value(Random& random, FrameHeader& header, int most) {
  header.packing = static_cast<Packing>(random_int(random, 0, static_cast<int>(kPackings) - 1));
  const std::size_t count = static_cast<std::size_t>(random_int(random, 0, most)) / sizeof(float);
  header.total = count * sizeof(float);
  header.bytes = static_cast<std::uint32_t>(packed_bytes(header.packing, count));
}

// A million headers, right ones with a few bytes changed: what is let through stays within a group's memory.
void mutated_headers() {
  constexpr int kHeaders = 1'000'000;
  Random random(6);
  const Geometry geometry{
      .ranks = 2, .channels = 2, .depth = 8, .slot_bytes = 256, .mailbox_depth = 4, .mailbox_slot_bytes = 512};
  int accepted = 0;
  for (int i = 0; i < kHeaders; ++i) {
    FrameHeader header{.kind = static_cast<std::uint32_t>(random_int(random, 1, 7)),
                       .bytes = static_cast<std::uint32_t>(random_int(random, 0, 600)),
                       .channel = static_cast<std::uint32_t>(random_int(random, 0, 2)),
                       .seq = static_cast<std::uint64_t>(random_int(random, 0, 20))};
    if (header.kind == FrameKind::slot) fill_in_value(random, header, 300);
    std::array<std::byte, sizeof header> bytes;
    std::memcpy(bytes.data(), &header, sizeof header);
    for (int change = random_int(random, 0, 3); change > 0; --change)
      bytes[static_cast<std::size_t>(random_int(random, 0, sizeof header - 1))] = static_cast<std::byte>(random());
    std::memcpy(&header, bytes.data(), sizeof header);
    if (!objection(header, geometry).empty()) continue;
    ++accepted;
    const std::size_t room = header.kind == FrameKind::slot ? geometry.slot_bytes
                             : header.kind == FrameKind::message
                                 ? geometry.mailbox_slot_bytes
                                 : std::max(sizeof(ControlImage), sizeof(ErrorImage) + kErrorText);
    const bool slot_fits = header.kind != FrameKind::slot || header.total <= room;
    check(header.kind >= 1 && header.kind <= 7 && header.channel < geometry.channels && header.bytes <= room &&
              slot_fits && header.seq + 1 + geometry.depth > header.seq,
          "hosts: a header that cannot be was accepted");
  }
  check(accepted > kHeaders / 100 && accepted < kHeaders, "hosts: all or no headers were accepted");
  std::printf("hosts: %d headers, %d accepted\n", kHeaders, accepted);
}

// Frames of every kind, some right, most with bytes changed, cut or added, into a rank's links.
void lies(int rounds) {
  Random random(5);
  int frames = 0;
  for (int round = 0; round < rounds; ++round) {
    Group group(2, 8, 256, {0, 1}, false);
    Rank& victim = *group.ranks[0];
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    victim.team->links()->take_over();
    victim.team->links()->add(1, ends[0], "a liar");
    bool broken = false;
    std::vector<std::byte> sent;
    std::array<std::uint64_t, 3> next{};  // of two channels and the mailbox
    for (int frame = 0; frame < 500 && !broken; ++frame, ++frames) {
      FrameHeader header{.kind = FrameKind::control,
                         .tag = random(),
                         .total = static_cast<std::uint64_t>(random_int(random, 0, 600)),
                         .dtype = static_cast<std::uint32_t>(random_int(random, 0, 20))};
      if (random_int(random, 0, 3) == 0) header.kind = static_cast<std::uint32_t>(random_int(random, 1, 6));
      switch (header.kind) {
        case FrameKind::control:
          header.bytes = sizeof(ControlImage);
          break;
        case FrameKind::error:
          header.bytes = static_cast<std::uint32_t>(sizeof(ErrorImage)) + static_cast<std::uint32_t>(random() % 2000);
          break;
        case FrameKind::slot:
          header.channel = static_cast<std::uint32_t>(random() % 2);
          header.seq = next[header.channel]++;
          fill_in_value(random, header, 256);
          break;
        case FrameKind::message:
          header.seq = next[2]++;
          header.bytes = static_cast<std::uint32_t>(random_int(random, 0, 256));
          break;
        default:  // gives back what this rank has not sent
          if (random_int(random, 0, 20) != 0) header.kind = FrameKind::control, header.bytes = sizeof(ControlImage);
      }
      sent.resize(sizeof header + header.bytes);
      std::memcpy(sent.data(), &header, sizeof header);
      std::generate(sent.begin() + sizeof header, sent.end(), [&] { return static_cast<std::byte>(random()); });
      for (int change = random_int(random, -60, 2); change > 0; --change)
        sent[static_cast<std::size_t>(random_int(random, 0, static_cast<int>(sent.size()) - 1))] =
            static_cast<std::byte>(random());
      if (random_int(random, 0, 200) == 0) sent.resize(sent.size() / 2);
      broken = write(ends[1], sent.data(), sent.size()) < 0;
      while (victim.team->links()->progress()) {
      }
      broken |= !victim.team->fate().gone().empty();
    }
    close(ends[1]);
    victim.team->links()->hand_over(false);
    try {  // whatever came, the rank's own calls end
      run_all_reduce(victim, 100, 20 * kMillisecond);
      check(false, "lies: a call with a liar ended well");
    } catch (const Error&) {
    }
  }
  std::printf("hosts: %d connections of lies, %d frames\n", rounds, frames);
}

}  // namespace

void stress_hosts() {
  for (const Layout& hosts : kLayouts) {
    collectives(hosts, true);
    collectives(hosts, false);
    messages(hosts);
    other_calls(hosts);
    never_comes(hosts);
    leaves(hosts);
  }
  mutated_headers();
  lies(200);
}

}  // namespace ringreduce::stress
