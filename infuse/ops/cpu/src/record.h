// Reads structs from the text that layers/native/part.py writes. A field is `name=value`; a part is
// `name=kind{ ... }`, with its own fields inside. Tensors, storages and reals are given beside the text: t3 is the
// tensor of index 3, s1 the storage of index 1, r0 the real of index 0. `none` stands for a missing tensor or part.
//
// A struct lists its fields once, with INFUSE_FIELDS. A field that the text lacks, or that the struct does not have, is
// an error that names it.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "binding.h"

namespace infuse {

#define INFUSE_FIELDS(...)           \
  template <class Read>              \
  void fields(const Read& read) {    \
    read(#__VA_ARGS__, __VA_ARGS__); \
  }

// A tensor that is written to.
struct Storage {
  Maybe array;
};

// `all`: the words of an enum. Of an enum without them, the numbers are written.
template <class E>
struct Words {};

struct Field {
  std::string_view name, value;  // of a part, its kind
  std::vector<Field> inside;
};

// The fields up to the end of the text, or up to the } of a part.
inline std::vector<Field> fields_of(std::string_view& text, bool of_a_part = false) {
  std::vector<Field> fields;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(word.size());
    if (word.empty() || word == "}") {
      STD_TORCH_CHECK(of_a_part == (word == "}"), "a program's text ends within a part");
      return fields;
    }
    const bool opens = word.back() == '{';
    if (opens) word.remove_suffix(1);
    const size_t at = word.find('=');
    STD_TORCH_CHECK(at != word.npos, "a program's text has no value for ", std::string(word));
    fields.push_back({word.substr(0, at), word.substr(at + 1), {}});
    if (opens) fields.back().inside = fields_of(text, true);
  }
}

class Reader {
 public:
  Reader(const std::vector<Tensor>& tensors, const std::vector<Tensor>& storages, const std::vector<double>& reals)
      : tensors_(tensors), storages_(storages), reals_(reals) {}

  template <class Part>
  Part part(const Field& of) const {
    Part made{};
    made.fields([&](std::string_view names, auto&... values) {
      const std::string_view all = names;
      (set(found(of, next(names)), values), ...);
      for (const Field& each : of.inside) {
        STD_TORCH_CHECK(has(all, each.name), std::string(of.value), " has no field ", std::string(each.name));
      }
    });
    return made;
  }

 private:
  // Cuts the next one off a list of names.
  static std::string_view next(std::string_view& names) {
    const size_t end = names.find(',');
    const std::string_view name = names.substr(0, end);
    names.remove_prefix(end == names.npos ? names.size() : end + 2);
    return name;
  }
  static bool has(std::string_view names, std::string_view name) {
    while (!names.empty()) {
      if (next(names) == name) return true;
    }
    return false;
  }
  static const Field& found(const Field& of, std::string_view name) {
    for (const Field& each : of.inside) {
      if (each.name == name) return each;
    }
    STD_TORCH_CHECK(false, std::string(of.value), " lacks the field ", std::string(name));
    return of;
  }
  [[noreturn]] static void refuse(const Field& of) {
    STD_TORCH_CHECK(false, std::string(of.name), " cannot be ", std::string(of.value));
    throw 0;
  }
  static int64_t number(const Field& of, std::string_view digits) {
    int64_t value = 0;
    const char* end = digits.data() + digits.size();
    const auto read = std::from_chars(digits.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end) refuse(of);
    return value;
  }
  // The index after the letter of its kind.
  static size_t index(const Field& of, char kind, size_t count) {
    if (of.value.empty() || of.value.front() != kind) refuse(of);
    const int64_t value = number(of, of.value.substr(1));
    if (value < 0 || size_t(value) >= count) refuse(of);
    return size_t(value);
  }

  void set(const Field& of, int64_t& value) const { value = number(of, of.value); }
  void set(const Field& of, double& value) const { value = reals_[index(of, 'r', reals_.size())]; }
  void set(const Field& of, bool& value) const {
    if (of.value != "true" && of.value != "false") refuse(of);
    value = of.value == "true";
  }
  void set(const Field& of, Maybe& value) const {
    if (of.value != "none") value = tensors_[index(of, 't', tensors_.size())];
  }
  void set(const Field& of, Storage& value) const {
    if (of.value != "none") value.array = Array::written(storages_[index(of, 's', storages_.size())]);
  }
  template <class T>
  void set(const Field& of, std::optional<T>& value) const {
    if (of.value == "none") return;
    T made{};
    set(of, made);
    value = std::move(made);
  }
  template <class T>
  void set(const Field& of, std::vector<T>& values) const {
    for (const Field& each : of.inside) set(each, values.emplace_back());
  }
  // The part of the kind that the text names.
  template <class... Parts>
  void set(const Field& of, std::variant<std::monostate, Parts...>& value) const {
    if (of.value == "none") return;
    const bool known = ((of.value == Parts::kKind && (value = part<Parts>(of), true)) || ...);
    if (!known) refuse(of);
  }
  template <class T>
  void set(const Field& of, T& value) const {
    if constexpr (requires { Words<T>::all; }) {
      for (const auto& [word, meant] : Words<T>::all) {
        if (word != of.value) continue;
        value = meant;
        return;
      }
      refuse(of);
    } else if constexpr (std::is_enum_v<T>) {
      value = T(number(of, of.value));
    } else {
      if (of.value != T::kKind) refuse(of);
      value = part<T>(of);
    }
  }

  const std::vector<Tensor>&tensors_, &storages_;
  const std::vector<double>& reals_;
};

}  // namespace infuse
