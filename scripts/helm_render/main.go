// Renders a Helm chart with the libraries that Helm renders with: text/template, sprig and
// sigs.k8s.io/yaml. It takes a folder and any number of values files, and writes the objects to
// standard output. Unlike Helm, it ignores hooks, dependencies and values.schema.json.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type tree = map[string]interface{}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: helm_render CHART [VALUES...]")
		os.Exit(2)
	}
	output, err := render(os.Args[1], os.Args[2:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm_render:", err)
		os.Exit(1)
	}
	fmt.Print(output)
}

func render(chart string, valueFiles []string) (string, error) {
	data, err := context(chart, valueFiles)
	if err != nil {
		return "", err
	}
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return "", err
	}
	sort.Strings(paths)
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(functions(root))
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		if _, err := root.New(path).Parse(string(text)); err != nil {
			return "", err
		}
	}
	var output strings.Builder
	for _, path := range paths {
		var text bytes.Buffer
		if err := root.ExecuteTemplate(&text, path, data); err != nil {
			return "", err
		}
		if strings.HasSuffix(path, ".yaml") {
			fmt.Fprintf(&output, "---\n# Source: %s\n%s\n", filepath.Base(path), text.String())
		}
	}
	return output.String(), nil
}

// context is the dot of a template.
func context(chart string, valueFiles []string) (tree, error) {
	values, err := read(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return nil, err
	}
	for _, path := range valueFiles {
		more, err := read(path)
		if err != nil {
			return nil, err
		}
		values = merge(values, more)
	}
	file, err := read(filepath.Join(chart, "Chart.yaml"))
	if err != nil {
		return nil, err
	}
	meta := tree{}
	for key, value := range file {
		meta[strings.ToUpper(key[:1])+key[1:]] = value
	}
	release := tree{"Name": "tideserve", "Namespace": "tideserve", "Service": "Helm",
		"IsInstall": true, "IsUpgrade": false, "Revision": 1}
	version := tree{"Version": "v1.32.0", "Major": "1", "Minor": "32"}
	return tree{"Values": values, "Chart": meta, "Release": release,
		"Capabilities": tree{"KubeVersion": version}}, nil
}

func read(path string) (tree, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	values := tree{}
	if err := yaml.Unmarshal(data, &values); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return values, nil
}

// merge overlays a user's values on those of a chart; null removes a value.
func merge(into, from tree) tree {
	for key, value := range from {
		more, isTree := value.(tree)
		present, wasTree := into[key].(tree)
		switch {
		case value == nil:
			delete(into, key)
		case isTree && wasTree:
			into[key] = merge(present, more)
		default:
			into[key] = value
		}
	}
	return into
}

// functions are sprig's, without those that read the environment (as in Helm), and Helm's functions
// that our templates use.
func functions(root *template.Template) template.FuncMap {
	known := sprig.TxtFuncMap()
	delete(known, "env")
	delete(known, "expandenv")
	known["toJson"] = func(value interface{}) string {
		data, err := json.Marshal(value)
		if err != nil {
			return ""
		}
		return string(data)
	}
	known["include"] = func(name string, data interface{}) (string, error) {
		var text bytes.Buffer
		err := root.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	return known
}
