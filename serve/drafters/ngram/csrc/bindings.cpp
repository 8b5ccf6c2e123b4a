// slipstream.serve.drafters.ngram.ngram_core: the core for Python. Signatures and documentation: ../ngram_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ngram.h"
#include "snapshot.h"

namespace py = pybind11;
using ngram::Ngram;

namespace {

// pybind11 makes a ValueError of std::invalid_argument. Inputs are converted; arrays that are written into must be the
// caller's own, or it would never see the result.
using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Longs = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using IntsOut = py::array_t<int32_t, py::array::c_style>;
using FloatsOut = py::array_t<float, py::array::c_style>;
using BoolsOut = py::array_t<bool, py::array::c_style>;

std::string shape(const py::array& array) { return py::str(py::tuple(array.attr("shape"))); }

void expect_shape(const char* name, const py::array& array, const std::vector<py::ssize_t>& expected) {
  const std::vector<py::ssize_t> actual(array.shape(), array.shape() + array.ndim());
  if (actual == expected) return;
  throw std::invalid_argument(std::string(name) + " has shape " + shape(array) + "; it must be " +
                              std::string(py::str(py::tuple(py::cast(expected)))));
}

// Names of any length, which users choose, take bounded memory.
std::string digest(const std::string& name) {
  if (name.size() < ngram::MAX_NAME) return name;
  return py::module_::import("hashlib").attr("sha256")(py::bytes(name)).attr("hexdigest")().cast<std::string>();
}

void admit(Ngram& self, int64_t row, const Ints& tokens, const std::string& name,
           const std::optional<std::string>& common) {
  expect_shape("tokens", tokens, {tokens.size()});
  const std::string short_name = digest(name);
  const std::optional<std::string> short_common = common ? std::optional(digest(*common)) : std::nullopt;
  py::gil_scoped_release release;
  self.admit(row, tokens.data(), static_cast<size_t>(tokens.size()), short_name, short_common);
}

std::vector<uint32_t> advance(Ngram& self, const Longs& rows, const Ints& emitted, IntsOut tokens, IntsOut parents,
                              FloatsOut scores, IntsOut matches, BoolsOut foreign) {
  const py::ssize_t num_columns = emitted.ndim() == 2 ? std::max<py::ssize_t>(1, emitted.shape(1)) : 1;
  const py::ssize_t width = tokens.ndim() == 2 ? tokens.shape(1) : 1;
  expect_shape("rows", rows, {rows.size()});
  expect_shape("emitted", emitted, {rows.size(), num_columns});
  expect_shape("tokens", tokens, {rows.size(), width});
  expect_shape("parents", parents, {rows.size(), width});
  expect_shape("scores", scores, {rows.size(), width});
  expect_shape("matches", matches, {rows.size()});
  expect_shape("foreign", foreign, {rows.size(), width});
  const ngram::Trees trees{static_cast<size_t>(width), tokens.mutable_data(),  parents.mutable_data(),
                           scores.mutable_data(),      foreign.mutable_data(), matches.mutable_data()};
  py::gil_scoped_release release;
  return self.advance(rows.data(), static_cast<size_t>(rows.size()), emitted.data(), static_cast<size_t>(num_columns),
                      trees);
}

void release(Ngram& self, int64_t row, std::optional<size_t> num_tokens) {
  py::gil_scoped_release release;
  self.release(row, num_tokens.value_or(SIZE_MAX));
}

void insert(Ngram& self, const Ints& tokens, const std::string& name) {
  expect_shape("tokens", tokens, {tokens.size()});
  const std::string short_name = digest(name);
  py::gil_scoped_release release;
  self.insert(tokens.data(), static_cast<size_t>(tokens.size()), short_name);
}

void save(Ngram& self, const std::filesystem::path& path) {
  py::gil_scoped_release release;
  self.save(path.string());
}

void load(Ngram& self, const std::filesystem::path& path, int32_t vocab_size) {
  py::gil_scoped_release release;
  self.load(path.string(), vocab_size);
}

py::dict stats(Ngram& self) {
  ngram::Stats stats;
  {
    py::gil_scoped_release release;
    stats = self.stats();
  }
  py::dict result;
  result["nodes"] = stats.nodes;
  result["bytes"] = stats.bytes;
  result["context_bytes"] = stats.context_bytes;
  result["inserted_tokens"] = stats.inserted_tokens;
  result["dropped_tokens"] = stats.dropped_tokens;
  result["waiting_tokens"] = stats.waiting_tokens;
  result["evicted_nodes"] = stats.evicted_nodes;
  result["drafted_tokens"] = stats.drafted_tokens;
  result["match_lengths"] = stats.match_lengths;
  return result;
}

py::list branches(Ngram& self) {
  std::vector<ngram::Branch> all;
  {
    py::gil_scoped_release release;
    all = self.branches();
  }
  py::list result;
  for (const ngram::Branch& branch : all) result.append(py::make_tuple(branch.name, branch.tokens, branch.frequencies));
  return result;
}

// A forked process gets the memory of a core, but not its thread, for which the destructor would wait forever.
struct DeleteWhereMade {
  pid_t process = getpid();
  void operator()(Ngram* core) const {
    if (getpid() == process) delete core;
  }
};

using Holder = std::unique_ptr<Ngram, DeleteWhereMade>;

Holder make(int64_t rows, int64_t capacity, int64_t branch_length, int64_t min_match, int64_t max_match, int64_t breadth,
            int64_t queue_tokens) {
  return Holder(new Ngram({rows, capacity, branch_length, min_match, max_match, breadth, queue_tokens}));
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ngram::FileError& error) {
    errno = error.number;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.what());
  } catch (const ngram::Contradiction& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
  }
}

}  // namespace

PYBIND11_MODULE(ngram_core, module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::register_local_exception_translator(translate);
  py::class_<Ngram, Holder>(module, "NgramCore")
      .def(py::init(&make), py::kw_only(), py::arg("rows") = 64, py::arg("capacity") = 1'000'000,
           py::arg("branch_length") = 18, py::arg("min_match") = 1, py::arg("max_match") = 12,
           py::arg("breadth") = 4, py::arg("queue_tokens") = 65'536)
      .def("admit", &admit, py::arg("row"), py::arg("tokens"), py::arg("namespace") = "",
           py::arg("common") = py::none())
      .def("advance", &advance, py::arg("rows"), py::arg("emitted"), py::arg("tokens").noconvert(),
           py::arg("parents").noconvert(), py::arg("scores").noconvert(), py::arg("matches").noconvert(),
           py::arg("foreign").noconvert())
      .def("release", &release, py::arg("row"), py::arg("num_tokens") = py::none())
      .def("insert", &insert, py::arg("tokens"), py::arg("namespace") = "")
      .def("flush", &Ngram::flush, unlocked())
      .def("save", &save, py::arg("path"))
      .def("load", &load, py::arg("path"), py::arg("vocab_size") = ngram::MAX_TOKEN + 1)
      .def("check", &Ngram::check, unlocked())
      .def("stats", &stats)
      .def("branches", &branches);
}
