#!/usr/bin/env python3
"""Tests of check_layers.py and size_report.py: each rule finds a file that breaks it."""
import pathlib
import tempfile
import unittest

import check_layers
import size_report


class Tree(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        for name in ("include/pianola", "src", "apps", "examples"):
            (self.root / name).mkdir(parents=True)
        self.write("include/pianola/error.h", "#include <string>\n")
        self.write("src/base/check.h", '#include "pianola/error.h"\n')
        self.write("src/tensor/dtype.h", '#include "base/check.h"\n')
        self.write("src/models/llama.h", '#include "tensor/dtype.h"\n')
        self.write("src/backends/backend.h", '#include "tensor/dtype.h"\n')

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class CheckLayers(Tree):
    def assert_finds(self, *parts):
        found = check_layers.check(self.root)
        self.assertEqual(len(found), 1, found)
        for part in parts:
            self.assertIn(part, found[0])

    def test_a_good_tree_passes(self):
        self.write("src/engine/engine.cc",
                   '#include "backends/backend.h"\n#include "models/llama.h"\n// calls getenv("X")\n')
        self.write("apps/pianola/main.cc", '#include "own.h"\nauto x = std::getenv("HOME");\n')
        self.write("src/engine/CMakeLists.txt", "pianola_layer(engine DEPENDS models backends)\n")
        self.assertEqual(check_layers.check(self.root), [])

    def test_an_include_that_points_up(self):
        self.write("src/base/bad.h", '\n#include "tensor/dtype.h"\n')
        self.assert_finds("src/base/bad.h:2", "tensor is not below")

    def test_a_sibling(self):
        self.write("src/models/bad.cc", '#include "backends/backend.h"\n')
        self.assert_finds("src/models/bad.cc:1", "backends is not below")

    def test_an_include_without_its_layer(self):
        self.write("src/tensor/bad.cc", '#include "dtype.h"\n')
        self.assert_finds("starts with its layer")

    def test_a_path_with_dots(self):
        self.write("src/tensor/bad.cc", '#include "tensor/../models/llama.h"\n')
        self.assert_finds("starts with its layer")

    def test_a_header_that_is_not_there(self):
        self.write("src/tensor/bad.cc", '#include "base/gone.h"\n')
        self.assert_finds("there is no src/base/gone.h")

    def test_a_public_header_that_shows_a_layer(self):
        self.write("include/pianola/engine.h", '#include "base/check.h"\n')
        self.assert_finds("include/pianola/engine.h:1")

    def test_an_environment_variable(self):
        self.write("src/base/bad.cc", 'auto x = std::getenv("THREADS");\n')
        self.assert_finds("src/base/bad.cc:1", "environment variable")

    def test_a_condition_on_cuda(self):
        for line in ("#ifdef PIANOLA_CUDA", "# if defined(USE_CUDA)", "#ifndef __CUDACC__"):
            self.write("src/backends/bad.cc", line + "\n#endif\n")
            self.assert_finds("a condition on CUDA")

    def test_the_inside_of_the_cuda_backend(self):
        self.write("src/backends/cuda.h", "")
        self.write("src/backends/cuda/device.h", "")
        self.write("src/backends/cuda/device.cc",
                   '#include "backends/cuda.h"\n#include "backends/cuda/device.h"\n')
        self.write("src/backends/registry.cc", '#include "backends/cuda.h"\n')
        self.assertEqual(check_layers.check(self.root), [])
        self.write("src/engine/bad.cc", '\n#include "backends/cuda/device.h"\n')
        self.assert_finds("src/engine/bad.cc:2", "backends/cuda.h")

    def test_a_dependency_in_cmake_that_points_up(self):
        self.write("src/tensor/CMakeLists.txt", "pianola_layer(tensor DEPENDS base models LINK fmt)\n")
        self.assert_finds("src/tensor/CMakeLists.txt", "models")

    def test_an_unknown_layer(self):
        self.write("src/utilities/x.h", "")
        self.assert_finds("is not a layer")

    def test_the_layers_have_no_cycle(self):
        for layer in check_layers.BELOW:
            for below in check_layers.BELOW[layer]:
                self.assertNotIn(layer, check_layers.closure(below))


class SizeReport(Tree):
    def test_long_files_and_functions(self):
        body = "  do_it();\n" * 90
        self.write("src/base/long.cc", "void first() {\n" + body + "}\n\nint second() { return 1; }\n")
        self.write("src/base/longer.cc", "\n" * 501)
        found = size_report.report(self.root)
        self.assertEqual(len(found), 2, found)
        self.assertIn("src/base/long.cc:1: first: 92 lines", found[0])
        self.assertIn("src/base/longer.cc: 501 lines", found[1])

    def test_kernels_may_be_longer(self):
        body = "void f() {\n" + "  do_it();\n" * 100 + "}\n" + "// x\n" * 420
        self.write("src/backends/cpu/kernels/attention.cc", body)
        self.assertEqual(size_report.report(self.root), [])

    def test_a_namespace_and_a_class_are_no_functions(self):
        inner = "int f() { return 1; }\n" * 100
        self.write("src/base/x.cc", "namespace a {\nnamespace {\nclass B : public C {\n" + inner +
                   "};\n}  // namespace\n}  // namespace a\n")
        self.assertEqual(size_report.report(self.root), [])

    def test_braces_in_strings_do_not_count(self):
        self.write("src/base/x.cc", 'void f() { g("{{{", \'{\', 1\'000, R"x({"a": {)x"); }  // {\n' +
                   "int x;\n" * 100)
        self.assertEqual(size_report.report(self.root), [])


if __name__ == "__main__":
    unittest.main()
