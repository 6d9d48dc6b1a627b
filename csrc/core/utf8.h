// Text in UTF-8, which Python refuses to read if it ends within a character.
#pragma once

#include <cstddef>
#include <string_view>

namespace ringreduce {

// As much of the beginning of `text` as `most` bytes hold, in whole characters.
inline std::string_view cut(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace ringreduce
